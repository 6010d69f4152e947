"""`agent-loop check tasks`: check the tasks of a folder, or those of a name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_loop.cli.arguments import EXIT_FAILED, JsonOption
from agent_loop.cli.verbosity import print_line
from agent_loop.config import load_config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, parse_override
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.checks.tasks import TaskReport


def check_tasks_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_NAME",
            help="Folder of a task, or of several tasks, in Harbor's form; or a name, suite:task?option=value.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that are merged over the workspaces of the tasks."
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration whose `data.workspace` is merged too.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1000, help="Number of tasks that are checked at once.")
    ] = 1,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Number of rows of a name to check.", show_default="all"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that the solution of every task scores 1, and that doing nothing scores 0.

    Each task of a folder runs its tests in two new containers: in one at once, in the other after the solution. Each
    row of a name is played twice, with one empty turn, which must score less than 1, and with the solution, if one is
    known. Exit code 1 if a task fails.

    Examples:

        agent-loop check tasks examples/tasks --concurrency 2

        agent-loop check tasks examples/tasks container.runtime=docker

        agent-loop check tasks examples/tasks/write-script container.build_args.BASE_IMAGE=debian-with-python

        agent-loop check tasks 'reasoning_gym:basic_arithmetic?size=100' --limit 20
    """
    from agent_loop.environments.tasks import is_task_name  # late: keeps `--help` quick

    console = Console(stderr=as_json)

    def show(report: TaskReport) -> None:
        verdict = Text("passed  ", style="green") if report.is_passed else Text("failed  ", style="red")
        console.print(verdict, Text(f"{report.name} ({report.seconds:.1f} s)"), soft_wrap=True)

    if is_task_name(source):
        if settings or config is not None:
            raise ConfigError(f"{source!r} has no workspace; leave out --config and KEY=VALUE")
        reports = _check_name(source, limit=limit, concurrency=concurrency, on_report=show)
    elif limit is not None:
        raise ConfigError("--limit is for rows of a name, such as suite:task; leave it out")
    else:
        reports = _check_folder(
            Path(source), settings=settings, config=config, concurrency=concurrency, on_report=show
        )
    _print_reports(reports, console)
    if as_json:
        shown = [{**asdict(report), "folder": report.folder and str(report.folder)} for report in reports]
        typer.echo(json.dumps(shown, indent=2))
    if not all(report.is_passed for report in reports):
        raise typer.Exit(EXIT_FAILED)


def _check_folder(
    path: Path, *, settings: Sequence[str] | None, config: Path | None, **options: Any
) -> Sequence[TaskReport]:
    from agent_loop.checks.tasks import check_tasks  # late: keeps `--help` quick

    given: dict[str, Any] = {} if config is None else dict(load_config(config).data.workspace)
    for setting in settings or []:
        given = merge_mappings(given, parse_override(setting))
    return run_to_end(check_tasks(path, settings=given, **options))


def _check_name(name: str, **options: Any) -> Sequence[TaskReport]:
    from agent_loop.checks.solutions import check_named_tasks  # late: loads transformers

    return run_to_end(check_named_tasks(name, **options))


def _print_reports(reports: Sequence[TaskReport], console: Console) -> None:
    table = Table("task", "doing nothing", "solution", "seconds", "")
    for report in reports:
        verdict = Text("passed", style="green") if report.is_passed else Text("failed", style="red")
        rewards = ("-" if reward is None else f"{reward:g}" for reward in (report.nothing, report.solution))
        table.add_row(report.name, *rewards, f"{report.seconds:.1f}", verdict)
    console.print(table)
    for report in reports:
        for problem in report.problems:
            print_line(console, f"{report.name}: {problem}", style="red")
        for ignored in report.ignored:
            print_line(console, f"{report.name}: no effect: {ignored}")
    num_failed = sum(not report.is_passed for report in reports)
    console.print(f"{len(reports) - num_failed} of {len(reports)} tasks passed")
