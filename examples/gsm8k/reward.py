"""Reward of trajectories without a call of the tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_loop.integrations.verl.gsm8k import read_answer, with_mark
from agent_loop.trajectory import AgentLoopOutput


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last answer is right, else 0."""
    return float(read_answer(output.answer) == read_answer(with_mark(row["reward_model"]["ground_truth"])))
