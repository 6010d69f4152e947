"""`agent-loop compare`: compare groups of training runs that differ in their seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from string import ascii_uppercase
from typing import Annotated, Any

import typer
from rich.console import Console

from agent_loop.cli.compare_tables import print_comparison
from agent_loop.errors import DataError
from agent_loop.training.evaluation.run_groups import RunGroup, choose_metrics, read_groups
from agent_loop.training.evaluation.seeds import MetricComparison, compare_metric


def compare_command(
    groups: Annotated[
        list[str],
        typer.Argument(
            metavar="GROUP",
            help="Runs that differ in their seeds: a quoted glob, a folder of runs, or several with commas between "
            "them. Each later group is compared with the first.",
            show_default=False,
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
        print_comparison(found, comparisons, names=names, num_points=points, console=Console())


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
