"""Demonstrations that teach the format, what can be done, and a bad habit."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agent_loop.types import Message

GIVE_UP = "I do not know."


class Task(Protocol):
    """What an example's `task.py` offers, beside its tools."""

    ANSWER: str
    """The form of an answer, with `{}` for the number."""

    def train_rows(self, seed: int = 0, count: int = 2048) -> list[dict[str, Any]]: ...

    def val_rows(self, seed: int = 1, count: int = 256) -> list[dict[str, Any]]: ...

    def solution(self, row: Mapping[str, Any]) -> list[Message]:
        """The turns that earn the reward."""
        ...


@runtime_checkable
class BringsTools(Protocol):
    """What the `task.py` of an agent that has tools of its own offers too."""

    def tool_schemas(self) -> list[dict[str, Any]]:
        """What the agent tells the model of them."""
        ...


@dataclass(frozen=True, slots=True)
class Habit:
    """How often demonstrations do the right thing. A wrong step ends the conversation: it gives up, or answers with a
    number already seen."""

    first_step_share: float
    later_step_share: float = 0.85
    """At each step after the first."""


def demonstrations(task: Task, *, rng: random.Random, habit: Habit) -> Iterator[list[Message]]:
    """Conversations without end, on questions of the kind that training rows ask; never on a held-out one."""
    while True:
        for row in task.train_rows(seed=rng.getrandbits(32), count=64):
            messages: list[Message] = list(row["prompt"])
            share = habit.first_step_share
            for turn in task.solution(row):
                if turn["role"] == "assistant":
                    if rng.random() >= share:
                        messages.append({"role": "assistant", "content": _wrong_answer(task, messages, rng)})
                        break
                    share = habit.later_step_share
                messages.append(turn)
            yield messages


def _wrong_answer(task: Task, messages: Sequence[Message], rng: random.Random) -> str:
    if rng.random() < 0.5:
        return GIVE_UP
    seen = [number for message in messages for number in re.findall(r"\d+", message["content"])]
    return task.ANSWER.format(rng.choice(seen))
