"""Task: compute (a ? b) ? c, where ? may be an operator that only the calculator knows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall
from examples.common.rows import draw_rows, tool_turns
from examples.langgraph_math.agent import OPERATIONS, calculate

SYSTEM = "Use the calculator."
QUESTION = "What is ({} {} {}) {} {}?"
ANSWER = "It is {}."


def tool_schemas() -> list[dict[str, Any]]:
    """Return the tool schemas that LangChain sends to the model."""
    return [convert_to_openai_tool(calculate)]


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
    first = ToolCall("calculate", {"a": row["a"], "b": row["b"], "operand": row["first"]})
    second = ToolCall("calculate", {"a": row["middle"], "b": row["c"], "operand": row["second"]})
    calls = [(first, row["middle"]), (second, row["result"])]
    return tool_turns(calls, answer=ANSWER.format(row["result"]))


def _row(rng: random.Random) -> dict[str, Any]:
    a, b, c = (rng.randrange(10, 100) for _ in range(3))
    first, second = rng.choices(list(OPERATIONS), k=2)
    middle = OPERATIONS[first](a, b)
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION.format(a, first, b, second, c)},
        ],
        "agent_name": "langgraph_math",
        "a": a,
        "first": first,
        "b": b,
        "second": second,
        "c": c,
        "middle": middle,
        "result": OPERATIONS[second](middle, c),
    }
