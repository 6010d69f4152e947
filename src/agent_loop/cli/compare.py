"""`agent-loop compare`: compare groups of training runs that differ in their seeds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from string import ascii_uppercase
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_loop.cli.eval_tables import colour_of, in_one
from agent_loop.cli.verbosity import print_line
from agent_loop.errors import DataError
from agent_loop.training.evaluation.estimates import MeanEstimate
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
FORMATS = ((1e6, ".3e"), (1e3, ".1f"), (0.1, ".3f"), (1e-3, ".5f"), (0.0, ".2e"))
"""Format of numbers by the largest of them."""
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
    points: Annotated[
        int, typer.Option("--points", min=2, help="Number of steps of the printed curves.")
    ] = 8,
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
    if len(groups) > len(ascii_uppercase):
        raise DataError(
            f"there are {len(groups)} groups, and at most {len(ascii_uppercase)} can be compared; quote globs, so that "
            "the shell does not make each run a group"
        )
    found = read_groups(groups)
    names = list(ascii_uppercase[: len(groups)])
    comparisons = [
        compare_metric(found, metric=name, num_recent=last)
        for name in choose_metrics(found, patterns=metric or ())
    ]
    if as_json:
        typer.echo(json.dumps(_as_json(found, comparisons, names=names, num_points=points), indent=2))
    else:
        _print(found, comparisons, names=names, num_points=points, console=Console())


def _as_json(
    groups: Sequence[RunGroup],
    comparisons: Sequence[MetricComparison],
    *,
    names: Sequence[str],
    num_points: int,
) -> dict[str, Any]:
    """Return the printed numbers. Lists have one item per group, or one per group after the first."""
    return {
        "groups": [
            {
                "name": name,
                "source": group.source,
                "runs": [{"path": run.path, "seed": run.seed} for run in group.runs],
            }
            for name, group in zip(names, groups, strict=True)
        ],
        "metrics": [
            {
                **asdict(comparison),
                "num_steps": len(comparison.curve),
                "curve": [asdict(point) for point in comparison.thin_curve(num_points)],
            }
            for comparison in comparisons
        ],
    }


def _print(
    groups: Sequence[RunGroup],
    comparisons: Sequence[MetricComparison],
    *,
    names: Sequence[str],
    num_points: int,
    console: Console,
) -> None:
    """Print the groups, and for each metric the means over runs, the differences, and the curves."""
    console.width = max(console.width, MIN_WIDTH, WIDTH_OF_STEP + WIDTH_OF_GROUP * len(groups))
    lines = [_description(group, name=name) for name, group in zip(names, groups, strict=True)]
    for line in (*lines, *_notes(groups, names=names)):
        print_line(console, line)
    for comparison in comparisons:
        console.print()
        print_line(console, _title(comparison), style="bold")
        console.print(_mean_table(comparison, groups=groups, names=names))
        console.print()
        console.print(_curve_table(comparison, names=names, num_points=num_points))
        for line in _separation_lines(comparison, groups=groups, names=names):
            print_line(console, line)


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
        notes.append(
            f"There is no interval for {' and '.join(single)}, because one run does not show a spread."
        )
    if len(groups) > 2 and len(single) == len(groups):
        notes.append("Each group has one run: quote globs, so that the shell does not make each run a group.")
    for name, group in zip(names, groups, strict=True):
        repeated = [str(seed) for seed, n in Counter(group.seeds).items() if n > 1 and seed is not None]
        if repeated:
            notes.append(
                f"Runs of {name} share trainer.seed {', '.join(repeated)}; the interval is too narrow unless other "
                "seeds differ."
            )
    for name, group in zip(names[1:], groups[1:], strict=True):
        if {name, names[0]}.isdisjoint(single):
            is_paired = are_paired(groups[0], group)
            how = (
                "paired by seed" if is_paired else "not paired, because the groups do not have the same seeds"
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


def _mean_table(comparison: MetricComparison, *, groups: Sequence[RunGroup], names: Sequence[str]) -> Table:
    spec = _number_format(comparison)
    columns = {f"last value (step {comparison.curve[-1].step})": comparison.last}
    if comparison.num_recent > 1:
        columns[f"mean of the last {comparison.num_recent} values"] = comparison.recent
    table = Table(box=None, pad_edge=False)
    for header in ("", *columns):
        table.add_column(header, no_wrap=True, min_width=WIDTH_OF_STEP - 2)
    nums = [len(group.runs) for group in groups]
    for index, name in enumerate(names):
        table.add_row(name, *(_cell(c.groups[index], spec, num_runs=nums[index]) for c in columns.values()))
    for index, name in enumerate(names[1:]):
        num_runs = min(nums[0], nums[index + 1])
        estimates = [column.differences[index].estimate for column in columns.values()]
        cells = (
            Text(_cell(each, f"+{spec}", num_runs=num_runs), style=colour_of(each)) for each in estimates
        )
        table.add_row(f"{name} - {names[0]}", *cells)
    return table


def _curve_table(comparison: MetricComparison, *, names: Sequence[str], num_points: int) -> Table:
    spec = _number_format(comparison)
    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right", min_width=WIDTH_OF_STEP - 2, no_wrap=True)
    for name in names:
        table.add_column(name, no_wrap=True)
    for point in comparison.thin_curve(num_points):
        table.add_row(str(point.step), *(_spread(estimate, spec) for estimate in point.groups))
    return table


def _separation_lines(
    comparison: MetricComparison, *, groups: Sequence[RunGroup], names: Sequence[str]
) -> list[str]:
    lines: list[str] = []
    for name, group, separation in zip(names[1:], groups[1:], comparison.separations, strict=True):
        intervals = f"The intervals of {names[0]} and {name} are apart"
        if separation is not None:
            first, num_steps = separation.first_step, len(comparison.curve)
            lines.append(
                f"{intervals} first at step {first}, and at {separation.num_steps} of {num_steps} steps."
            )
        elif min(len(groups[0].runs), len(group.runs)) > 1:
            lines.append(f"{intervals} at no step.")
    return lines


def _cell(estimate: MeanEstimate, spec: str, *, num_runs: int) -> str:
    text = in_one(estimate, lambda value: format(value, spec))
    return f"{text} (no spread)" if estimate.low is None and num_runs > 1 else text


def _spread(estimate: MeanEstimate, spec: str) -> str:
    """Return the mean and half of the interval's width."""
    half = estimate.half_width
    return format(estimate.value, spec) + ("" if half is None else f" ± {format(half, spec)}")


def _number_format(comparison: MetricComparison) -> str:
    """Return the format of all numbers of a metric, which depends on the largest."""
    largest = max(abs(estimate.value) for point in comparison.curve for estimate in point.groups)
    return ".3f" if largest == 0 else next(spec for least, spec in FORMATS if largest >= least)
