"""How the `check-...` commands show what they find."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from agent_loop.testing.checks import CheckReport, CheckResult

EXIT_FAILED = 1
COLOURS = {"passed": "green", "failed": "red", "skipped": "dim"}


def printer(console: Console) -> Callable[[CheckResult], None]:
    """Prints each result on a line."""

    def print_result(result: CheckResult) -> None:
        detail = f" ({result.detail})" if result.detail else ""
        verdict = Text(f"{result.verdict:8}", style=COLOURS[result.verdict])
        console.print(verdict, Text(f"{result.name}{detail}"), soft_wrap=True)

    return print_result


def print_counts(report: CheckReport, console: Console) -> None:
    """How many checks passed, failed and were skipped."""
    counts = [f"{len(report.named(verdict))} {verdict}" for verdict in ("passed", "failed", "skipped")]
    console.print(f"{report.subject}: {', '.join(counts)}")
