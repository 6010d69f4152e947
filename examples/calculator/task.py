"""Multiply a three-digit by a two-digit number: too hard in the head, easy with the calculator."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agent_loop.tools.function import function_tool
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall

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
    """Rows about pairs of factors that are not held out."""
    return _rows(random.Random(seed), count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Rows about held-out pairs: no training row asks for any of them."""
    return _rows(random.Random(seed), count=count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """1 if the last answer gives the right product, else 0."""
    return float(output.answer.strip() == ANSWER.format(row["product"]))


def solution(row: Mapping[str, Any]) -> list[Message]:
    """The turns that earn the reward."""
    call = ToolCall("multiply", {"a": row["a"], "b": row["b"]}).as_message()
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(row["product"])},
        {"role": "assistant", "content": ANSWER.format(row["product"])},
    ]


def _rows(rng: random.Random, *, count: int, held_out: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        a, b = rng.randrange(100, 1000), rng.randrange(10, 100)
        if _is_held_out(a, b) == held_out:
            rows.append(_row(a, b))
    return rows


def _is_held_out(a: int, b: int) -> bool:
    return (a + b) % 7 == 0


def _row(a: int, b: int) -> dict[str, Any]:
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
