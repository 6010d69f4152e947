"""Checks before a command starts, and runs of rows with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agent_loop.cli.verbosity import VERBOSITY, print_line
from agent_loop.config import Config
from agent_loop.errors import AgentLoopError
from agent_loop.runtime.garbage_collection import frozen_objects
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

if TYPE_CHECKING:
    from agent_loop.checks.before_start import Checks
    from agent_loop.rollout.journal import StepKey

EXIT_FAULTS = 2
EXIT_INTERRUPTED = 130
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check files, names, code, model and memory, print one line for each check, and start nothing.",
    ),
]


def check_rollout(config: Config, *, rows: Sequence[Row], is_dry_run: bool) -> None:
    """Check what a rollout of rows needs before torch is imported, which takes seconds."""
    from agent_loop.checks.before_start import PlannedRun, checks_of  # late: keeps `--help` quick

    run = PlannedRun(config, sources={}, rows=list(rows), is_thorough=is_dry_run)
    run_checks(checks_of(run), is_dry_run=is_dry_run)


def run_checks(checks: Checks, *, is_dry_run: bool) -> None:
    """Run checks. A dry run prints one line for each, and exits with code 2 if one fails."""
    console, num_faults = Console(highlight=False, soft_wrap=True), 0
    for name, check in checks.items():
        mark, style = "ok", "green"
        try:
            found = check()
        except AgentLoopError as error:
            if not is_dry_run:
                raise
            mark, style, found = "ERROR", "bold red", str(error)
            num_faults += 1
        if is_dry_run and found:
            console.print(f"{mark:5}", style=style, end=" ")
            print_line(console, f"{name}: {found}")
    if num_faults:
        noun = "error" if num_faults == 1 else "errors"
        print_line(console, f"{num_faults} {noun}; nothing was started")
        raise typer.Exit(EXIT_FAULTS)
    if is_dry_run:
        print_line(console, "everything is there; run the command without --dry-run to start")


async def run_rows(
    config: Config,
    *,
    rows: Sequence[Row],
    n: int | None,
    validate: bool,
    console: Console,
    on_trajectory: Callable[[Trajectory], object],
    journal_path: Path | None = None,
    resume: bool = False,
) -> list[Trajectory]:
    """Start the servers of the configuration, run the rows and close the servers.

    Args:
        on_trajectory: Called with each trajectory as it ends, so that those are not lost if the run stops early.
        journal_path: Journal of the turns; None writes no journal. The caller holds a lock on the file.
        resume: Resume the rollout in the journal.
    """
    # late: keeps `--help` quick
    from agent_loop.distributed import create_manager
    from agent_loop.rollout.journal import open_journal
    from agent_loop.training.progress import without_progress_of_transformers

    num_samples = n or (config.rollout.val.n if validate else config.rollout.n)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with without_progress_of_transformers():
        async with create_manager(config) as manager:
            with (
                frozen_objects(),
                Progress(*columns, *times, console=console, disable=VERBOSITY.quiet) as progress,
            ):
                task = progress.add_task("trajectories", total=len(rows) * num_samples)
                ended: set[tuple[int, int]] = set()

                def count_trajectory(trajectory: Trajectory) -> None:
                    on_trajectory(trajectory)
                    ended.add((trajectory.group, trajectory.rollout))
                    progress.update(task, completed=len(ended))

                if journal_path is None:
                    return await manager.run(rows, n=n, validate=validate, on_trajectory=count_trajectory)
                key = key_of(config, rows=rows, num_samples=num_samples)
                opening = open_journal(
                    journal_path, key=key, rows=rows, resume=resume, refuse=True, lock=False
                )
                async with opening as journal:
                    if journal.note:
                        print_line(console, journal.note)
                    return await manager.run(
                        rows, n=n, validate=validate, on_trajectory=count_trajectory, journal=journal
                    )


def key_of(config: Config, *, rows: Sequence[Row], num_samples: int) -> StepKey:
    """Return the key by which a journal recognises this run of these rows."""
    from agent_loop.rollout.journal import StepKey, rollout_settings  # late: keeps `--help` quick

    return StepKey.of(
        rows, step=0, weight_version=0, num_samples=num_samples, settings=rollout_settings(config)
    )


def by_id(trajectory: Trajectory) -> tuple[int, int, int]:
    """Return a sort key: group, rollout, branch."""
    return trajectory.group, trajectory.rollout, trajectory.branch or 0
