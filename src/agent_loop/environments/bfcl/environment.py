"""Environment of one task of BFCL, judged after every user turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, cast

from agent_loop.environments.base import Environment, EnvironmentTool, Reply, RewardValue
from agent_loop.environments.bfcl.tasks import CHECKERS, entry_of, functions_of, gold_executor, import_bfcl
from agent_loop.errors import ToolError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import ArgumentChecking
from agent_loop.types import Message

MISSING_CALLS = "multi_turn:empty_turn_model_response"
"""BFCL's name for a turn without calls where the gold calls are some."""

_lock = Lock()
"""Held while code of BFCL runs. A few of its methods change a dict that all instances share, and return it."""


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
