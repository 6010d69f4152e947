"""Multi-turn tasks of BFCL: simulated APIs with state, and users who ask for something in every turn."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, ClassVar, cast

from agent_loop.config import Section
from agent_loop.environments.base import Environment, EnvironmentTool, Reply, RewardValue
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.errors import ToolError
from agent_loop.loading import import_extra
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import ArgumentChecking
from agent_loop.types import Message, ToolCall

MISSING_CALLS = "multi_turn:empty_turn_model_response"
"""BFCL's name for a turn without calls where the gold calls are some."""
_lock = Lock()
"""Held while code of BFCL runs. A few of its methods change a dict that all instances share, and return it."""
LONG_CONTEXT = "multi_turn_long_context"
CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", LONG_CONTEXT)
CHECKERS = "eval_checker.multi_turn_eval"
TYPES: Mapping[str, str] = {"dict": "object", "float": "number", "tuple": "array"}
"""Types of BFCL's schemas that JSON schema calls otherwise."""


class BfclOptions(Section):
    """Options of BFCL's tasks."""

    stop_at_failure: bool = False
    """Whether a failed turn ends the trajectory. The reward is the same; the parts count fewer turns."""


class BfclSuite(TaskSuite):
    """Multi-turn categories of BFCL. Every turn is judged by BFCL's own checkers."""

    name = "bfcl"
    extra = "bfcl"
    summary = (
        "BFCL's multi-turn tasks: tools of simulated APIs, judged by state and response after every turn"
    )
    options: ClassVar[type[Section]] = BfclOptions
    reward_parts: ClassVar[Mapping[str, str]] = {
        "reward": "1 if every turn passed, else 0",
        "turns_passed": "share of the task's turns that passed",
        "first_failure": "BFCL's name for the first failure, or `unfinished`; empty if every turn passed",
    }

    def tasks(self) -> Sequence[str]:
        import_bfcl("constants.executable_backend_config")
        return CATEGORIES

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        for name, entry in entries_of(task).items():
            column = {"category": task, "id": name, "stop_at_failure": options.stop_at_failure}
            yield {"raw_prompt": [dict(message) for message in entry["question"][0]], "task": column}

    def environment(self) -> Environment:
        return BfclEnvironment()

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn]:
        """Return the gold calls of each user turn, each followed by a text that ends the user turn."""
        entry = entry_of(row["task"])
        signatures = signatures_of(entry["involved_classes"])
        turns: list[SolutionTurn] = []
        for gold in entry["gold"]:
            calls = tuple(parse_call(text, signatures=signatures) for text in gold)
            turns += [SolutionTurn(calls=calls)] * bool(calls) + [SolutionTurn(text="Done.")]
        return turns

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the number of the task, which its variants in the other categories share."""
        return str(row["task"]["id"]).rpartition("_")[2]


def parse_call(text: str, *, signatures: Mapping[str, Sequence[str]]) -> ToolCall:
    """Parse a call that is written in Python."""
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r} is not a call of a function")
    name = call.func.id
    arguments = dict(zip(signatures[name], map(ast.literal_eval, call.args), strict=False))
    arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ToolCall(name, arguments)


class BfclEnvironment(Environment):
    """Instances of the APIs of one task, and a second set of instances on which the gold calls are executed."""

    on_replay = OnReplay.RERUN

    def reset(self, row: Mapping[str, Any]) -> None:
        self._entry = entry_of(row["task"])
        self._stops_at_failure = bool(row["task"]["stop_at_failure"])
        self._functions, self._withheld = functions_of(self._entry)
        self._execute_gold = gold_executor(self._entry)
        with _lock:
            _, self._instances = gold_executor(self._entry)([])
        self._methods = {
            name: getattr(instance, name)
            for instance in self._instances.values()
            for name in self._functions
            if hasattr(instance, name)
        }
        self._results: list[str] = []
        self._num_calls = 0
        self._failures: list[str] = []
        """Failure of each finished turn; empty for a turn that passed."""

    def tools(self) -> Sequence[EnvironmentTool]:
        # BFCL checks no arguments: its executor reports what Python raises, and one gold call contradicts its schema.
        return [
            EnvironmentTool(schema, is_shown=name not in self._withheld, check_arguments=ArgumentChecking.OFF)
            for name, schema in self._functions.items()
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._withheld.get(name, 0) > len(self._failures):
            raise ToolError(f"there is no tool {name!r}")
        with _lock:
            result = _result_of(self._methods[name], arguments)
        self._num_calls += 1
        self._results.append(result)
        return result

    def reply(self, messages: Sequence[Message]) -> Reply:
        turn = len(self._failures)
        failure = self._judge(self._entry["gold"][turn])
        self._failures.append(failure)
        self._num_calls = 0
        questions = self._entry["question"]
        is_over = turn + 1 == len(questions) or (self._stops_at_failure and bool(failure))
        content = "" if is_over else self._user_turn(turn + 1)
        extra = {"turn": turn, "failure": failure}
        return Reply(content, score=float(not failure), is_over=is_over, extra=extra)

    def reward(self, messages: Sequence[Message]) -> RewardValue:
        num_turns = len(self._entry["question"])
        is_finished = len(self._failures) == num_turns
        first_failure = next(filter(None, self._failures), "" if is_finished else "unfinished")
        return {
            "reward": float(not first_failure),
            "turns_passed": self._failures.count("") / num_turns,
            "first_failure": first_failure,
        }

    def _judge(self, gold_calls: Sequence[str]) -> str:
        """Return BFCL's name for the failure of the turn, or an empty str, in the order of its checker."""
        with _lock:
            gold_results, gold_instances = self._execute_gold(gold_calls)
        if not gold_calls:
            return ""  # as in BFCL, whose verdict on such a turn is that of the next one
        if not self._num_calls:
            return MISSING_CALLS
        checker = import_bfcl(f"{CHECKERS}.multi_turn_checker")
        verdict = checker.state_checker(self._instances, gold_instances)
        if verdict["valid"]:
            verdict = checker.response_checker(self._results, gold_results, len(self._failures))
        return "" if verdict["valid"] else str(verdict["error_type"])

    def _user_turn(self, turn: int) -> str:
        """Return the text of a user turn. A turn without text announces the functions that were withheld until it."""
        if self._entry["question"][turn]:
            return "\n".join(message["content"] for message in self._entry["question"][turn])
        new = [
            self._functions[name]["function"]
            for name, available in self._withheld.items()
            if available == turn
        ]
        prompts = import_bfcl("constants.default_prompts")
        return prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=json.dumps(new))


def _result_of(method: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Call a method and return the text that BFCL's executor gives for its result or exception."""
    try:
        result = method(**arguments)
        if isinstance(result, str):
            return result
        if type(result) is not dict:
            return str(result)
    except Exception as error:  # noqa: BLE001  (the model reads the errors of its calls, as in BFCL)
        return f"Error during execution: {error}"
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(cast(Any, result))


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
    """Import a module of `bfcl_eval`."""
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
