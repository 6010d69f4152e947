"""`agent-loop compare`: compare groups of training runs that differ in their seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_loop.cli.eval_tables import colour_of, in_one
from agent_loop.cli.verbosity import print_line
from agent_loop.training.evaluation.runs import (
    MetricComparison,
    RunGroup,
    are_paired,
    choose_metrics,
    compare_metric,
    read_groups,
)

MIN_WIDTH = 100
"""Characters per line, also of narrower terminals, because long numbers must not be cut off."""
WIDTH_OF_STEP = 8
WIDTH_OF_GROUP = 25
FORMATS = ((1e6, ".3e"), (1e3, ".1f"), (0.1, ".3f"), (1e-3, ".5f"), (1e-30, ".2e"))
"""Format of numbers by the largest of them."""
MAX_GROUPS = 26
MAX_NAMES = 3
"""Number of runs without some steps that are named."""
MAX_SEEDS = 10
"""Number of seeds that are printed of a group."""


def compare_command(
    groups: Annotated[
        list[str],
        typer.Argument(
            metavar="GROUP",
            help="Runs that differ in their seeds: a quoted glob, a folder of runs, or several with commas between "
            "them. Each later group is compared with the first.",
        ),
    ],
    *,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            help="Metric to compare, or a glob such as `val/*`. May be given more than once.",
            show_default="rewards, success share and pass@k",
        ),
    ] = None,
    last: Annotated[
        int, typer.Option("--last", metavar="K", min=1, help="Also compare the mean of the last K values.")
    ] = 10,
    points: Annotated[int, typer.Option("--points", min=2, help="Steps of the printed curves.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Compare groups of training runs by their metrics: means over seeds with 95% confidence intervals.

    Prints the last value, the mean of the last values and the curve of each group, and the differences from the first
    group. Differences are paired by seed if the groups have the same values of `trainer.seed`. Only steps at which all
    runs have a value are compared.

    Examples:

        agent-loop compare "runs/grpo-*" "runs/gdpo-*"

        agent-loop compare runs/grpo-0,runs/grpo-1 runs/gdpo-0,runs/gdpo-1 --last 20

        agent-loop compare "runs/grpo-*" "runs/gdpo-*" --metric actor/entropy --metric "val/*" --json
    """
    if len(groups) > MAX_GROUPS:
        raise typer.BadParameter(f"at most {MAX_GROUPS} groups are compared; quote globs for the shell")
    found = read_groups(groups)
    names = [chr(ord("A") + index) for index in range(len(groups))]
    comparisons = [
        compare_metric(found, metric=name, num_recent=last)
        for name in choose_metrics(found, patterns=metric or ())
    ]
    if as_json:
        typer.echo(json.dumps(_as_json(found, comparisons, names=names, num_points=points), indent=2))
        return
    console = Console()
    console.width = max(console.width, MIN_WIDTH, WIDTH_OF_STEP + WIDTH_OF_GROUP * len(groups))
    for name, group in zip(names, found, strict=True):
        print_line(console, _description(group, name=name))
    for line in _notes(found, names=names):
        print_line(console, line)
    for comparison in comparisons:
        console.print()
        print_line(console, _title(comparison), style="bold")
        console.print(_mean_table(comparison, names=names))
        console.print()
        console.print(_curve_table(comparison, names=names, num_points=points))


def _as_json(
    groups: Sequence[RunGroup],
    comparisons: Sequence[MetricComparison],
    *,
    names: Sequence[str],
    num_points: int,
) -> dict[str, Any]:
    """Return the printed numbers. Lists have one item per group, or one per group after the first."""
    shown = [
        {
            "name": name,
            "source": group.source,
            "runs": [{"path": run.path, "seed": run.seed} for run in group.runs],
        }
        for name, group in zip(names, groups, strict=True)
    ]
    metrics = [
        {
            **asdict(comparison),
            "num_steps": len(comparison.curve),
            "curve": [asdict(point) for point in comparison.thin_curve(num_points)],
        }
        for comparison in comparisons
    ]
    return {"groups": shown, "metrics": metrics}


def _description(group: RunGroup, *, name: str) -> str:
    runs = "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs"
    shown = ", ".join("?" if seed is None else str(seed) for seed in group.seeds[:MAX_SEEDS])
    more = ", ..." if len(group.seeds) > MAX_SEEDS else ""
    return f"{name}  {group.source}: {runs}, trainer.seed {shown}{more}"


def _notes(groups: Sequence[RunGroup], *, names: Sequence[str]) -> list[str]:
    """Return sentences on how far the intervals can be trusted."""
    single = [name for name, group in zip(names, groups, strict=True) if len(group.runs) == 1]
    notes = ["Intervals are 95% intervals over runs."] if len(single) < len(groups) else []
    if single:
        notes.append(f"There is no interval for {' and '.join(single)}: one run does not show a spread.")
    if len(groups) > 2 and len(single) == len(groups):
        notes.append("Each group has one run: quote globs, so that the shell does not make each run a group.")
    for name, group in zip(names[1:], groups[1:], strict=True):
        if {name, names[0]}.isdisjoint(single):
            how = (
                "paired by seed"
                if are_paired(groups[0], group)
                else "not paired: the seeds of the groups differ"
            )
            notes.append(f"{name} - {names[0]} is {how}.")
    return notes


def _title(comparison: MetricComparison) -> str:
    steps = f"{len(comparison.curve)} steps" if len(comparison.curve) > 1 else "1 step"
    if not comparison.num_steps_left_out:
        return f"{comparison.metric}: {steps}"
    runs = comparison.incomplete_runs
    lacking = ", ".join(runs[:MAX_NAMES]) + (", ..." if len(runs) > MAX_NAMES else "")
    return f"{comparison.metric}: {steps}; left out: {comparison.num_steps_left_out} without a value in {lacking}"


def _mean_table(comparison: MetricComparison, *, names: Sequence[str]) -> Table:
    spec = _number_format(comparison)
    columns = {f"last value (step {comparison.curve[-1].step})": comparison.last}
    if comparison.num_recent > 1:
        columns[f"mean of the last {comparison.num_recent} values"] = comparison.recent
    table = _table("", *columns)
    for index, name in enumerate(names):
        table.add_row(name, *(in_one(column.groups[index], spec) for column in columns.values()))
    for index, name in enumerate(names[1:]):
        estimates = [column.differences[index] for column in columns.values()]
        cells = (Text(in_one(each, f"+{spec}"), style=colour_of(each)) for each in estimates)
        table.add_row(f"{name} - {names[0]}", *cells)
    return table


def _curve_table(comparison: MetricComparison, *, names: Sequence[str], num_points: int) -> Table:
    spec = _number_format(comparison)
    table = _table("step", *names)
    for point in comparison.thin_curve(num_points):
        cells: list[str] = []
        for estimate in point.groups:
            half = "" if estimate.half_width is None else f" ± {format(estimate.half_width, spec)}"
            cells.append(format(estimate.value, spec) + half)
        table.add_row(str(point.step), *cells)
    return table


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in headers:
        justify = "right" if header == "step" else "left"
        table.add_column(header, justify=justify, no_wrap=True, min_width=WIDTH_OF_STEP - 2)
    return table


def _number_format(comparison: MetricComparison) -> str:
    """Return the format of all numbers of a metric, which depends on the largest."""
    largest = max(abs(estimate.value) for point in comparison.curve for estimate in point.groups)
    return next((spec for least, spec in FORMATS if largest >= least), ".3f")
