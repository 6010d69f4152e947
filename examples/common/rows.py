"""Helpers for the rows and solutions of examples about calculations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from agent_loop.types import Message, ToolCall

HELD_OUT_MODULUS = 7


def draw_rows(
    draw: Callable[[random.Random], dict[str, Any]], *, seed: int, count: int, held_out: bool
) -> list[dict[str, Any]]:
    """Draw `count` rows, either only held-out rows or none of them.

    A row is held out if the sum of its numbers `a`, `b` and, if present, `c` is divisible by 7.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        row = draw(rng)
        is_held_out = (row["a"] + row["b"] + row.get("c", 0)) % HELD_OUT_MODULUS == 0
        if is_held_out == held_out:
            rows.append(row)
    return rows


def tool_turns(calls: Iterable[tuple[ToolCall, int]], *, answer: str) -> list[Message]:
    """Return the turns of an assistant that makes one call after the other and then answers.

    Args:
        calls: The calls with their results.
        answer: The last turn.
    """
    turns: list[Message] = []
    for call, result in calls:
        turns.append({"role": "assistant", "content": "", "tool_calls": [call.as_message()]})
        turns.append({"role": "tool", "content": str(result)})
    return [*turns, {"role": "assistant", "content": answer}]
