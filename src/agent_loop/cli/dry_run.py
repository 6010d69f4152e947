"""`--dry-run`: check what a command needs, and start nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agent_loop.config import Config
from agent_loop.types import Row

if TYPE_CHECKING:
    from agent_loop.checks.before_start import PlannedRun

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
    from agent_loop.checks.before_start import PlannedRun, refuse_faults  # late: keeps `--help` quick

    run = PlannedRun(settings, sources={}, rows=list(rows), is_thorough=is_dry_run)
    if is_dry_run:
        print_checks(run)
    else:
        refuse_faults(run)
    return is_dry_run


def print_checks(run: PlannedRun) -> None:
    """Run all checks and print one line for each; exit with code 2 if one fails."""
    from agent_loop.checks.before_start import findings  # late: keeps `--help` quick

    console, num_faults = Console(highlight=False, soft_wrap=True), 0
    for finding in findings(run):
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
