"""`--dry-run`: check what a command needs, and start nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.types import Row

if TYPE_CHECKING:
    from agent_loop.checks.before_start import Checks

EXIT_FAULTS = 2

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check files, names, code, model and memory, print one line for each check, and start nothing.",
    ),
]


def check_before(settings: Config, *, rows: Sequence[Row], is_dry_run: bool) -> bool:
    """Check what a rollout of rows needs before torch is imported, which takes seconds.

    Returns:
        Whether the checks were all that was asked for.

    Raises:
        AgentLoopError: Something is missing or does not fit. A dry run prints it instead, and exits with code 2.
    """
    from agent_loop.checks.before_start import PlannedRun, checks_of  # late: keeps `--help` quick

    run_checks(
        checks_of(PlannedRun(settings, sources={}, rows=list(rows), is_thorough=is_dry_run)),
        is_dry_run=is_dry_run,
    )
    return is_dry_run


def check_training(
    checks_of: Callable[[bool], Checks],
    *,
    resume: bool,
    resume_from: Path | None,
    overwrite: bool,
    is_dry_run: bool,
) -> bool:
    """Check what a training needs before torch is imported. Of several processes, that of rank 0 does.

    Args:
        checks_of: Returns the checks. Its argument is whether the run is resumed.
        resume: Whether the run in the folder is resumed.
        resume_from: Checkpoint or run to resume from.
        overwrite: Whether the run may replace another one.
        is_dry_run: Whether the checks are all that was asked for.

    Returns:
        `is_dry_run`.

    Raises:
        AgentLoopError: As for `check_before`.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one of them")
    if is_dry_run or os.environ.get("RANK", "0") == "0":
        from agent_loop.checks.before_start import check_resume_source  # late: keeps `--help` quick

        if resume_from is not None:
            check_resume_source(resume_from)
        run_checks(checks_of(resume or resume_from is not None), is_dry_run=is_dry_run)
    return is_dry_run


def run_checks(checks: Checks, *, is_dry_run: bool) -> None:
    """Run checks. A dry run prints one line for each, and exits with code 2 if one fails.

    Raises:
        AgentLoopError: A check failed, and this is no dry run.
    """
    from agent_loop.checks.before_start import findings, refuse_faults  # late: keeps `--help` quick

    if not is_dry_run:
        refuse_faults(checks)
        return

    console, num_faults = Console(highlight=False, soft_wrap=True), 0
    for finding in findings(checks):
        num_faults += finding.error is not None
        mark, style = ("ok", "green") if finding.error is None else ("ERROR", "bold red")
        console.print(f"{mark:5}", style=style, end=" ")
        console.print(f"{finding.check}: {finding.found}", markup=False)
    if num_faults:
        console.print(
            f"{num_faults} {'error' if num_faults == 1 else 'errors'}; nothing was started", markup=False
        )
        raise typer.Exit(EXIT_FAULTS)
    console.print("everything is there; run the command without --dry-run to start", markup=False)
