"""What the examples that work out sums have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from agent_loop.types import Message, ToolCall

HELD_OUT_MODULUS = 7


def drawn_rows(
    draw: Callable[[random.Random], dict[str, Any]], *, seed: int, count: int, held_out: bool
) -> list[dict[str, Any]]:
    """Rows as they are drawn, either held out or not: held out are numbers `a`, `b` (and `c`) whose sum 7 divides."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        row = draw(rng)
        is_held_out = (row["a"] + row["b"] + row.get("c", 0)) % HELD_OUT_MODULUS == 0
        if is_held_out == held_out:
            rows.append(row)
    return rows


def tool_turns(calls: Iterable[tuple[ToolCall, int]], *, answer: str) -> list[Message]:
    """The turns of an assistant that makes calls one after the other, each with its result, and then answers."""
    turns: list[Message] = []
    for call, result in calls:
        turns.append({"role": "assistant", "content": "", "tool_calls": [call.as_message()]})
        turns.append({"role": "tool", "content": str(result)})
    return [*turns, {"role": "assistant", "content": answer}]
