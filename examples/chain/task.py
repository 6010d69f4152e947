"""Task: compute a * b + c with two tool calls, of which the second needs the result of the first."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agent_loop.tools.function import function_tool
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall
from examples.common.rows import draw_rows, tool_turns

SYSTEM = "Use the calculator."
QUESTION = "What is {} * {} + {}?"
ANSWER = "It is {}."


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


@function_tool
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: First summand.
        b: Second summand.
    """
    return a + b


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about triples of numbers that are not held out."""
    return draw_rows(_row, seed=seed, count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Return rows about held-out triples, which no training row asks about."""
    return draw_rows(_row, seed=seed, count=count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last answer gives the right result, else 0."""
    return float(output.answer.strip() == ANSWER.format(row["result"]))


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward."""
    first = ToolCall("multiply", {"a": row["a"], "b": row["b"]})
    second = ToolCall("add", {"a": row["product"], "b": row["c"]})
    calls = [(first, row["product"]), (second, row["result"])]
    return tool_turns(calls, answer=ANSWER.format(row["result"]))


def _row(rng: random.Random) -> dict[str, Any]:
    a, b, c = (rng.randrange(10, 100) for _ in range(3))
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION.format(a, b, c)},
        ],
        "agent_name": "tool_agent",
        "a": a,
        "b": b,
        "c": c,
        "product": a * b,
        "result": a * b + c,
    }
