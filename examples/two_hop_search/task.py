"""Task: find a shelf with two searches, first for the part of an order, then for the shelf of that part."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from agent_loop.tools.search.tool import SearchTool
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall
from examples.common.rows import draw_rows

SYSTEM = "Search for the shelf."
QUESTION = "Which shelf holds the part of order {}?"
ANSWER = "Shelf {}."
FOUND = "Doc 1 (Title: {})\n{}"
"""Format string of the tool's results."""
ORDERS = range(1000, 10_000)
PARTS = range(100, 1000)
CORPUS = Path("~/.cache/agent_loop/examples/two_hop_search.jsonl").expanduser()


class Archive(SearchTool):
    """Search tool over the documents of this example, with one query per call."""

    tool_schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds the document that fits best.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for."}},
                "required": ["query"],
            },
        },
    }

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        super().__init__({"corpus": [str(write_corpus())], "topk": 1, **config}, tool_schema)


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about orders that are not held out."""
    return draw_rows(_row, seed=seed, count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Return rows about held-out orders, which no training row asks about."""
    return draw_rows(_row, seed=seed, count=count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last answer names the right shelf, else 0."""
    return float(output.answer.strip() == ANSWER.format(row["shelf"]))


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward."""
    turns: list[Message] = []
    for title in (f"Order {row['a']}", f"Part {row['b']}"):
        call = ToolCall("search", {"query": title}).as_message()
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        turns.append({"role": "tool", "content": FOUND.format(title, documents()[title])})
    return [*turns, {"role": "assistant", "content": ANSWER.format(row["shelf"])}]


@cache
def documents() -> Mapping[str, str]:
    """Return the texts of all documents by title: 9,000 orders and 900 parts, too many for a tiny model to memorize."""
    texts = {f"Order {order}": f"It is about part {_part_of(order)}." for order in ORDERS}
    return texts | {f"Part {part}": f"It is on shelf {_shelf_of(part)}." for part in PARTS}


@cache
def write_corpus() -> Path:
    """Write the documents to the file that the tool reads, and return its path."""
    lines = [json.dumps({"title": title, "text": text}) for title, text in documents().items()]
    CORPUS.parent.mkdir(parents=True, exist_ok=True)
    unfinished = CORPUS.with_suffix(f".{os.getpid()}")
    unfinished.write_text("\n".join(lines), encoding="utf-8")
    unfinished.replace(CORPUS)
    return CORPUS


def _part_of(order: int) -> int:
    return random.Random(order).choice(PARTS)


def _shelf_of(part: int) -> int:
    return random.Random(-part).randrange(10, 100)


def _row(rng: random.Random) -> dict[str, Any]:
    order = rng.choice(ORDERS)
    part = _part_of(order)
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION.format(order)},
        ],
        "agent_name": "tool_agent",
        "a": order,
        "b": part,
        "shelf": _shelf_of(part),
    }
