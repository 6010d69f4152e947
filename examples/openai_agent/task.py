"""The questions of the calculator, for an agent that brings its tools itself."""

from __future__ import annotations

from typing import Any

from examples.calculator import task as calculator
from examples.calculator.task import ANSWER, reward, solution
from examples.openai_agent.agent import TOOLS

__all__ = ["ANSWER", "reward", "solution", "tool_schemas", "train_rows", "val_rows"]


def tool_schemas() -> list[dict[str, Any]]:
    """What the agent tells the model of its tools."""
    return TOOLS


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Rows about pairs of factors that are not held out."""
    return [{**row, "agent_name": "openai_agent"} for row in calculator.train_rows(seed, count)]


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Rows about held-out pairs: no training row asks for any of them."""
    return [{**row, "agent_name": "openai_agent"} for row in calculator.val_rows(seed, count)]
