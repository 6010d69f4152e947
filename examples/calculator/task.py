"""Task: multiply a three-digit by a two-digit number, which a tiny model can only do with the calculator."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agent_loop.tools.function import function_tool
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall
from examples.common.rows import draw_rows, tool_turns

SYSTEM = "Use the calculator."
QUESTION = "What is {} * {}?"
ANSWER = "It is {}."


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about pairs of factors that are not held out."""
    return draw_rows(_row, seed=seed, count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Return rows about held-out pairs, which no training row asks for."""
    return draw_rows(_row, seed=seed, count=count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last answer gives the right product, else 0."""
    return float(output.answer.strip() == ANSWER.format(row["product"]))


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward."""
    call = ToolCall("multiply", {"a": row["a"], "b": row["b"]})
    return tool_turns([(call, row["product"])], answer=ANSWER.format(row["product"]))


def _row(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randrange(100, 1000), rng.randrange(10, 100)
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION.format(a, b)},
        ],
        "agent_name": "tool_agent",
        "a": a,
        "b": b,
        "product": a * b,
    }
