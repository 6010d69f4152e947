"""Task: find a shelf with two look-ups, from an order to its part, and from the part to its shelf."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from agent_loop.errors import ToolError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall

SYSTEM = "Find the shelf."
QUESTION = "Which shelf holds the part of order {}?"
ANSWER = "Shelf {}."
ORDERS = range(1000, 10_000)
"""Orders, too many to memorize, so that a model must copy the numbers that it reads."""
ORDERS_PER_ROW = 8


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about orders that are not held out, each with its own relations."""
    rng = random.Random(seed)
    orders = [number for number in ORDERS if not _is_held_out(number)]
    return [_row(rng, asked_order=rng.choice(orders)) for _ in range(count)]


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Return rows about held-out orders, which no training row asks about."""
    rng = random.Random(seed)
    orders = [number for number in ORDERS if _is_held_out(number)]
    return [_row(rng, asked_order=rng.choice(orders)) for _ in range(count)]


async def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last answer names the right shelf, else 0.

    The function is async because it never blocks, so that it needs no thread.
    """
    return float(output.answer.strip() == ANSWER.format(row["shelf"]))


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward."""
    order_call = ToolCall("part_of_order", {"order": row["order"]}).as_message()
    shelf_call = ToolCall("shelf_of_part", {"part": row["part"]}).as_message()
    return [
        {"role": "assistant", "content": "", "tool_calls": [order_call]},
        {"role": "tool", "content": str(row["part"])},
        {"role": "assistant", "content": "", "tool_calls": [shelf_call]},
        {"role": "tool", "content": str(row["shelf"])},
        {"role": "assistant", "content": ANSWER.format(row["shelf"])},
    ]


def lookup_schema(name: str, *, key: str, description: str) -> dict[str, Any]:
    """Return the OpenAI schema of a tool that takes one number."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": "integer", "description": f"The number of the {key}."}},
        "required": [key],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


class LookupTool(BaseTool):
    """Looks up a number in the table of the row."""

    key: ClassVar[str]
    """Name of the tool's only parameter."""
    on_replay = OnReplay.RECORDED

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        super().__init__(config, tool_schema)
        self._tables: dict[str, Mapping[str, int]] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self._tables[instance_id] = kwargs["table"]

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        number = parameters[self.key]
        found = self._tables[instance_id].get(str(number))
        if found is None:
            raise ToolError(f"There is no {self.key} {number}.")
        return ToolResponse(text=str(found)), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._tables.pop(instance_id, None)


class PartOfOrder(LookupTool):
    key = "order"
    tool_schema = lookup_schema("part_of_order", key=key, description="Tells which part an order is about.")


class ShelfOfPart(LookupTool):
    key = "part"
    tool_schema = lookup_schema("shelf_of_part", key=key, description="Tells which shelf holds a part.")


def _is_held_out(order: int) -> bool:
    return order % 7 == 0


def _row(rng: random.Random, *, asked_order: int) -> dict[str, Any]:
    others = (number for number in rng.sample(ORDERS, ORDERS_PER_ROW) if number != asked_order)
    orders = [asked_order, *others][:ORDERS_PER_ROW]
    parts = rng.sample(range(100, 1000), ORDERS_PER_ROW)
    shelves = [rng.randrange(10, 100) for _ in parts]
    part_of_order = {str(order): part for order, part in zip(orders, parts, strict=True)}
    shelf_of_part = {str(part): shelf for part, shelf in zip(parts, shelves, strict=True)}
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION.format(asked_order)},
        ],
        "agent_name": "tool_agent",
        "tools_kwargs": {
            "part_of_order": {"create_kwargs": {"table": part_of_order}},
            "shelf_of_part": {"create_kwargs": {"table": shelf_of_part}},
        },
        "order": asked_order,
        "part": parts[0],
        "shelf": shelves[0],
    }
