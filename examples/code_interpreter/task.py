"""Task: compute the sum of the digits of a power with one line of Python."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall
from examples.common.rows import draw_rows, tool_turns

SYSTEM = "Write Python."
QUESTION = "What is the sum of the digits of {} to the power of {}?"
CODE = "print(sum(map(int, str({} ** {}))))"
ANSWER = "It is {}."


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about powers that are not held out."""
    return draw_rows(_row, seed=seed, count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Return rows about held-out powers, which no training row asks for."""
    return draw_rows(_row, seed=seed, count=count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last answer gives the right sum, else 0."""
    return float(output.answer.strip() == ANSWER.format(row["sum"]))


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward."""
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
