"""Tasks, functions and code of the package `bfcl-eval`, of which nothing else is imported."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

from agent_loop.loading import import_extra

LONG_CONTEXT = "multi_turn_long_context"
CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", LONG_CONTEXT)
CHECKERS = "eval_checker.multi_turn_eval"
TYPES: Mapping[str, str] = {"dict": "object", "float": "number", "tuple": "array"}
"""Types of BFCL's schemas that JSON schema calls otherwise."""


@lru_cache
def entries_of(category: str) -> dict[str, dict[str, Any]]:
    """Return the tasks of a category by id, in BFCL's form, with their gold calls under `gold`."""
    gold = {
        entry["id"]: entry["ground_truth"] for entry in _lines(f"possible_answer/BFCL_v4_{category}.json")
    }
    return {
        entry["id"]: {**entry, "gold": gold[entry["id"]], "is_long_context": category == LONG_CONTEXT}
        for entry in _lines(f"BFCL_v4_{category}.json")
    }


def entry_of(column: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the task of a row, from its column `task`."""
    return entries_of(column["category"])[column["id"]]


def functions_of(entry: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Return the schemas of a task's functions by name, and the turn from which each withheld function is available."""
    schemas = {
        function["name"]: _tool_schema(function)
        for class_name in entry["involved_classes"]
        for function in _documented(class_name)
        if function["name"] not in entry.get("excluded_function", ())
    }
    withheld: dict[str, int] = {}
    for turn, names in entry.get("missed_function", {}).items():
        # A function that the gold calls use before its turn is not withheld. One task has such a function.
        used = {text.partition("(")[0] for calls in entry["gold"][: int(turn)] for text in calls}
        withheld |= {name: int(turn) for name in names if name not in used}
    return schemas, withheld


def signatures_of(class_names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the parameters of the classes' functions, in order, by function."""
    signatures: dict[str, list[str]] = {}
    for class_name in class_names:
        api = getattr(
            import_bfcl(_backend().CLASS_FILE_PATH_MAPPING[class_name].partition(".")[2]), class_name
        )
        for function in _documented(class_name):
            _, *names = inspect.signature(getattr(api, function["name"])).parameters
            signatures[function["name"]] = names
    return signatures


def gold_executor(entry: Mapping[str, Any]) -> Callable[[Sequence[str]], tuple[list[str], dict[str, Any]]]:
    """Return BFCL's executor of gold calls, with instances of its own.

    BFCL keeps instances as global variables of a module. A copy of the function with globals of its own frees them with
    the trajectory.
    """
    function = import_bfcl(f"{CHECKERS}.multi_turn_utils").execute_multi_turn_func_call
    own = FunctionType(function.__code__, {**function.__globals__})

    def execute(calls: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        return own(
            list(calls),
            entry["initial_config"],
            entry["involved_classes"],
            "gold",
            entry["id"],
            entry["is_long_context"],
            True,
        )

    return execute


def json_schema_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a schema in BFCL's form, with its nested schemas, to a JSON schema."""
    converted = dict(schema)
    if "type" in converted:
        converted["type"] = TYPES.get(converted["type"], converted["type"])
    if "properties" in converted:
        converted["properties"] = {
            name: json_schema_of(field) for name, field in converted["properties"].items()
        }
    if "items" in converted:
        converted["items"] = json_schema_of(converted["items"])
    return converted


def import_bfcl(name: str) -> Any:
    """Import a module of `bfcl_eval`.

    Raises:
        ConfigError: The package is not installed.
    """
    return import_extra(f"bfcl_eval.{name}", extra="bfcl", by="the suite bfcl")


def _tool_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = json_schema_of(function["parameters"])
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function["description"],
            "parameters": parameters,
        },
    }


@lru_cache
def _documented(class_name: str) -> list[dict[str, Any]]:
    return _lines(f"multi_turn_func_doc/{_backend().MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]}")


def _lines(name: str) -> list[dict[str, Any]]:
    data = Path(_backend().__file__).parents[1] / "data"
    return [json.loads(line) for line in (data / name).read_text(encoding="utf-8").splitlines()]


def _backend() -> Any:
    return import_bfcl("constants.executable_backend_config")
