"""Render reports of conformance checks, for a terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from agent_loop.testing.conformance import VERDICTS, CheckReport, CheckResult, OnResult

COLOURS = {"passed": "green", "failed": "red", "skipped": "dim"}


def result_printer(console: Console) -> OnResult:
    """Return a callback that prints each result on a line."""

    def print_result(result: CheckResult) -> None:
        detail = f" ({result.detail})" if result.detail else ""
        verdict = Text(f"{result.verdict:8}", style=COLOURS[result.verdict])
        console.print(verdict, Text(f"{result.name}{detail}"), soft_wrap=True)

    return print_result


def print_counts(report: CheckReport, console: Console) -> None:
    """Print how many checks passed, failed and were skipped."""
    counts = [f"{len(report.named(verdict))} {verdict}" for verdict in VERDICTS]
    console.print(f"{report.subject}: {', '.join(counts)}")


def reports_as_json(reports: Sequence[CheckReport]) -> str:
    """Return a JSON object with the results of each subject."""
    results = {report.subject: [asdict(result) for result in report.results] for report in reports}
    return json.dumps(results, indent=2)
