"""Task: look a number up in a file with a shell, and write it to another file."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_loop.types import Message, ToolCall
from agent_loop.workspaces.tools import NO_OUTPUT

WORKSPACE = Path(__file__).parent / "workspace"
SYSTEM = "Use the shell."
QUESTION = "Write the stock of part {} to the file answer."
ANSWER = "{} pieces."
LOOKUP = "grep ^{} stock"
WRITE = "echo {} > answer"
CHECK = 'test "$(cat answer)" = {}'
"""Command that judges the result in the agent's workspace."""
HELD_OUT_MODULUS = 7


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about parts that are not held out."""
    return _rows(seed, count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 64) -> list[dict[str, Any]]:
    """Return rows about held-out parts, which no training row asks about."""
    return _rows(seed, count=count, held_out=True)


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward."""
    part, stock = row["part"], row["stock"]
    return [
        _shell(LOOKUP.format(part)),
        {"role": "tool", "content": f"{part} {stock}"},
        _shell(WRITE.format(stock)),
        {"role": "tool", "content": NO_OUTPUT},
        {"role": "assistant", "content": ANSWER.format(stock)},
    ]


def read_stock() -> dict[int, int]:
    """Return the stock of every part, as the agent finds it in its workspace."""
    lines = (WORKSPACE / "stock").read_text().splitlines()
    return {int(part): int(stock) for part, stock in (line.split() for line in lines)}


def _rows(seed: int, *, count: int, held_out: bool) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    stock = read_stock()
    parts = [part for part in stock if (part % HELD_OUT_MODULUS == 0) == held_out]
    return [_row(part, stock=stock[part]) for part in rng.choices(parts, k=count)]


def _row(part: int, *, stock: int) -> dict[str, Any]:
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION.format(part)},
        ],
        "workspace": {"check": {"command": ["sh", "-c", CHECK.format(stock)]}},
        "part": part,
        "stock": stock,
    }


def _shell(command: str) -> Message:
    call = ToolCall("shell", {"command": command}).as_message()
    return {"role": "assistant", "content": "", "tool_calls": [call]}
