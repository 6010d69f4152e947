"""Verdicts of checks and stages, their table, their file, and the exit status of the program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Verdict: TypeAlias = Literal["passed", "failed", "not run"]
NO_GPU = "no GPU"
NO_MODEL = "no pretrained model was given"
NO_VLLM = "vllm is not installed"
TABLE_WIDTH = 120
COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number."""

    name: str
    value: float
    unit: str = ""
    limit: str = ""
    """Text of the limit that the number must keep; empty if it is for information only."""

    def __str__(self) -> str:
        number = f"{self.value:.3g}" if abs(self.value) < 1000 else f"{self.value:,.0f}"
        unit = self.unit if self.unit in ("", "%") else f" {self.unit}"
        return f"{self.name} {number}{unit}" + (f" ({self.limit})" if self.limit else "")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check of a stage."""

    name: str
    verdict: Verdict
    seconds: float
    figures: tuple[Figure, ...] = ()
    reason: str = ""
    """Why the check failed or was not run."""
    traceback: str = ""
    """Traceback of the exception that failed the check."""

    def __str__(self) -> str:
        others = [text for text in map(str, self.figures) if text not in self.reason]
        details = [self.reason, *others] if self.reason else others
        mark = "" if self.verdict == "passed" else f"{self.verdict.upper()}: "
        return f"{self.name}: {mark}{', '.join(details) or self.verdict}"

    @classmethod
    def parse(cls, line: str) -> CheckResult:
        """Return the result that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "figures": tuple(Figure(**figure) for figure in fields["figures"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of one stage."""

    stage: str
    verdict: Verdict
    seconds: float = 0.0
    checks: tuple[CheckResult, ...] = ()
    reason: str = ""
    """Why the stage was not run, or ended without its last check."""
    stacks: str = ""
    """Stacks of the threads of a process that crashed or exceeded its time limit."""

    @property
    def is_fine(self) -> bool:
        """Whether the stage passed, or was not run because the machine lacks what it is about."""
        return self.verdict == "passed" or (
            self.verdict == "not run" and self.reason in (NO_GPU, NO_MODEL, NO_VLLM)
        )


def verdict_of(checks: Sequence[CheckResult]) -> Verdict:
    """Return the verdict of a stage that ran to its end: a check that fails fails the stage."""
    verdicts = {check.verdict for check in checks}
    if "failed" in verdicts:
        return "failed"
    return "passed" if "passed" in verdicts else "not run"


def exit_status(results: Sequence[StageResult]) -> int:
    """Return 0 if every stage passed or was not run because there is no GPU, else 1."""
    return 0 if results and all(result.is_fine for result in results) else 1


def table_of(results: Sequence[StageResult], *, machine: str) -> Table:
    """Return the table of verdicts."""
    table = Table(title=escape(machine), show_lines=True)
    for column, justify in (("stage", "left"), ("verdict", "left"), ("s", "right"), ("figures", "left")):
        table.add_column(column, justify=justify, no_wrap=column in ("stage", "s"))  # pyright: ignore[reportArgumentType]
    for result in results:
        verdict = result.verdict + (f": {result.reason}" if result.reason else "")
        table.add_row(
            result.stage,
            f"[{COLOURS[result.verdict]}]{escape(verdict)}[/]",
            f"{result.seconds:.0f}" if result.seconds else "",
            escape("\n".join(map(str, result.checks))),
        )
    return table


def write_results(
    results: Sequence[StageResult], path: Path, *, machine: str, versions: Mapping[str, str]
) -> None:
    """Write all results as JSON, and the table of verdicts to a text file beside it."""
    content = {
        "machine": machine,
        "versions": versions,
        "exit_status": exit_status(results),
        "stages": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    with path.with_suffix(".txt").open("w") as file:
        Console(file=file, width=TABLE_WIDTH).print(table_of(results, machine=machine))
