"""Runs rows and shows how far it is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agent_loop.config import Config
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row


async def run_rows(
    config: Config,
    *,
    rows: Sequence[Row],
    n: int | None,
    validate: bool,
    console: Console,
    finished: list[Trajectory],
) -> list[Trajectory]:
    """Starts the servers of the configuration, runs the rows and closes the servers again.

    Args:
        finished: Gets each trajectory as it ends, so that they are there even if the run is stopped.
    """
    from agent_loop.rollout.manager import AgentLoopManager  # late: keeps `--help` quick

    num_samples = n or (config.rollout.val.n if validate else config.rollout.n)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    async with AgentLoopManager.from_config(config) as manager:
        with Progress(*columns, *times, console=console) as progress:
            task = progress.add_task("trajectories", total=len(rows) * num_samples)

            def on_trajectory(trajectory: Trajectory) -> None:
                finished.append(trajectory)
                progress.advance(task)

            return await manager.run(rows, n=n, validate=validate, on_trajectory=on_trajectory)


def by_id(trajectory: Trajectory) -> tuple[int, int, int]:
    """The order of the rows and of their samples."""
    return trajectory.group, trajectory.rollout, trajectory.branch or 0
