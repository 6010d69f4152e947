"""A suite of tasks for tests of names and commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

import pytest

from agent_loop.environments import factory, tasks
from agent_loop.environments.base import Environment
from agent_loop.environments.suite import SizedOptions, SolutionTurn, TaskSuite
from agent_loop.errors import ConfigError

SUITES = {"sums": "tests.environments.sums:SumSuite", "absent": "tests.environments.sums:AbsentSuite"}


class SumOptions(SizedOptions):
    """Options of `SumSuite`."""

    most: int = 50


class SumEnvironment(Environment):
    """Environment that rewards the sum."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.total = str(row["total"])

    def reward(self, messages: Sequence[Mapping[str, Any]]) -> float:
        return float(messages[-1]["content"] == self.total)


class SumSuite(TaskSuite):
    """Generated sums. `easy` repeats its questions, and `unsolvable` has a wrong solution."""

    name, extra, summary = "sums", "", "sums of two numbers"
    options = SumOptions
    reward_parts: ClassVar[Mapping[str, str]] = {"reward": "1 for the sum"}

    def tasks(self) -> Sequence[str]:
        return ["easy", "same", "broken", "unsolvable"]

    def rows(self, task: str, options: SumOptions) -> Iterator[dict[str, Any]]:
        for number in count(options.seed):
            if task == "broken":
                raise ZeroDivisionError("no sums")
            first = 0 if task == "same" else number % options.most
            yield {"raw_prompt": f"{first} + 1", "total": first + (1 if task != "unsolvable" else 2)}

    def environment(self) -> Environment:
        return SumEnvironment()

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn]:
        question = row["raw_prompt"][0]["content"]
        return [SolutionTurn(text=str(sum(map(int, question.split("+")))))]


class AbsentSuite(SumSuite):
    """Suite whose package is not installed."""

    name = "absent"

    def tasks(self) -> Sequence[str]:
        raise ConfigError('the suite absent needs absent: pip install "agent-loop[absent]"')


def use_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the suites of the package by those of this module."""
    for module in (factory, tasks):
        monkeypatch.setattr(module, "SUITES", SUITES)
