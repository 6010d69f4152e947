"""Demonstrations that teach the format, the tools, and a bad habit."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agent_loop.types import Message

GIVE_UP = "I do not know."


class Task(Protocol):
    """Interface of an example's `task.py`, without its tools."""

    ANSWER: str
    """Format string of an answer, with `{}` for the number."""

    def train_rows(self, seed: int = 0, count: int = 2048) -> list[dict[str, Any]]: ...

    def val_rows(self, seed: int = 1, count: int = 256) -> list[dict[str, Any]]: ...

    def solution(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the turns that earn the reward."""
        ...


@runtime_checkable
class TaskWithTools(Protocol):
    """Interface of a `task.py` whose agent has its own tools."""

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tool schemas that the agent sends to the model."""
        ...


@runtime_checkable
class TaskWithModel(Protocol):
    """Interface of a `task.py` for a pretrained model."""

    def prepare_model(self, folder: Path) -> Path:
        """Return the folder of the model, which is made in `folder` if it is not there yet."""
        ...


@runtime_checkable
class TaskWithDemonstrations(Protocol):
    """Interface of a `task.py` for an environment that is named in `config.yaml`, with demonstrations of its own."""

    def demonstrations(self, rng: random.Random) -> Iterator[list[Message]]:
        """Yield conversations without limit. They end with a turn of the assistant or of the environment."""
        ...


@dataclass(frozen=True, slots=True)
class Habit:
    """Probabilities of a correct step in a demonstration.

    A wrong step ends the conversation: the assistant gives up, or answers with a number from the conversation.
    """

    first_step_share: float
    later_step_share: float = 0.85
    """Probability at each step after the first."""


def demonstrations(task: Task, *, rng: random.Random, habit: Habit) -> Iterator[list[Message]]:
    """Yield conversations without limit, on questions like those of the training rows and never on held-out ones."""
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
