"""Task: the questions of the calculator, for an agent with its own tools."""

from __future__ import annotations

from typing import Any

from examples.calculator import task as calculator
from examples.calculator.task import ANSWER, reward, solution
from examples.openai_agent.agent import TOOLS

__all__ = ["ANSWER", "reward", "solution", "tool_schemas", "train_rows", "val_rows"]


def tool_schemas() -> list[dict[str, Any]]:
    """Return the tool schemas that the agent sends to the model."""
    return TOOLS


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about pairs of factors that are not held out."""
    return [{**row, "agent_name": "openai_agent"} for row in calculator.train_rows(seed, count)]


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Return rows about held-out pairs, which no training row asks for."""
    return [{**row, "agent_name": "openai_agent"} for row in calculator.val_rows(seed, count)]
