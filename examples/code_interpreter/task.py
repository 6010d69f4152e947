"""Sum the digits of a power: one line of Python, and nothing that a tiny model could do in its head."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall
from examples.common.sums import drawn_rows, tool_turns

SYSTEM = "Write Python."
QUESTION = "What is the sum of the digits of {} to the power of {}?"
CODE = "print(sum(map(int, str({} ** {}))))"
ANSWER = "It is {}."


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Rows about powers that are not held out."""
    return drawn_rows(_row, seed=seed, count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Rows about held-out powers: no training row asks for any of them."""
    return drawn_rows(_row, seed=seed, count=count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """1 if the last answer gives the right sum, else 0."""
    return float(output.answer.strip() == ANSWER.format(row["sum"]))


def solution(row: Mapping[str, Any]) -> list[Message]:
    """The turns that earn the reward."""
    call = ToolCall("python", {"code": CODE.format(row["a"], row["b"])})
    return tool_turns([(call, row["sum"])], answer=ANSWER.format(row["sum"]))


def _row(rng: random.Random) -> dict[str, Any]:
    base, exponent = rng.randrange(100, 1000), rng.randrange(10, 100)
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION.format(base, exponent)},
        ],
        "agent_name": "tool_agent",
        "a": base,
        "b": exponent,
        "sum": sum(map(int, str(base**exponent))),
    }
