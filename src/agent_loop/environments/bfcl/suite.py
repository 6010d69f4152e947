"""The suite `bfcl`: BFCL's multi-turn categories by name, and their gold calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agent_loop.config import Section
from agent_loop.environments.base import Environment
from agent_loop.environments.bfcl.environment import BfclEnvironment
from agent_loop.environments.bfcl.tasks import CATEGORIES, entries_of, entry_of, import_bfcl, signatures_of
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.types import ToolCall


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
    """Parse a call that is written in Python.

    Args:
        text: The call. Its arguments are literals.
        signatures: Names of each function's parameters, for arguments without a name.

    Raises:
        ValueError: The text is not such a call.
    """
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r} is not a call of a function")
    name = call.func.id
    arguments = dict(zip(signatures[name], map(ast.literal_eval, call.args), strict=False))
    arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ToolCall(name, arguments)
