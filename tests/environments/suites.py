"""Turns of suites of tasks, played through the loop of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.checks.solutions import play_turns
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.trajectory import Trajectory
from agent_loop.types import ToolCall

DONE = SolutionTurn(text="Done.")


def play(suite: TaskSuite, row: Mapping[str, Any], turns: Sequence[SolutionTurn]) -> Trajectory:
    """Play turns in a row's environment, and check that the trajectory has not failed."""
    trajectory = asyncio.run(play_turns(suite, row, turns))
    assert trajectory.output.failure is None
    return trajectory


def calls_turn(name: str, **arguments: Any) -> SolutionTurn:
    return SolutionTurn(calls=(ToolCall(name, arguments),))


def texts(trajectory: Trajectory, role: str) -> list[str]:
    return [message["content"] for message in trajectory.output.messages if message["role"] == role]


def part(trajectory: Trajectory, name: str) -> Any:
    return trajectory.output.extra_fields[name]
