"""`agent-loop check sandbox`: check what isolates the code of the python tool on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from agent_loop.cli.check.options import EXIT_FAILED, CheckTimeoutOption, JsonOption
from agent_loop.config import parse_section
from agent_loop.files.plain_values import parse_override
from agent_loop.runtime.event_loop import run_to_end


def check_sandbox_command(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the python tool.", show_default=False),
    ] = None,
    *,
    timeout_s: CheckTimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Check every mechanism that can isolate code, and print what each one isolates.

    Each mechanism runs one sandbox whose code attempts what it must not be able to do. The python tool uses the first
    mechanism that passes. Exit code 1 if none passes.

    Examples:

        agent-loop check sandbox

        agent-loop check sandbox python=/usr/bin/python3 mechanism=landlock
    """
    # late: keeps `--help` quick
    from agent_loop.checks import check_sandbox
    from agent_loop.testing.rendering import print_counts, reports_as_json, result_printer
    from agent_loop.tools.sandbox.settings import SandboxSettings

    given = parse_section(SandboxSettings, _read(settings or []), where="the settings given")
    console = Console(stderr=as_json)
    report = run_to_end(check_sandbox(given, timeout_s=timeout_s, on_result=result_printer(console)))
    print_counts(report, console)
    passed = report.named("passed")
    if passed:
        console.print(f"The python tool uses {passed[0]}.")
    if as_json:
        typer.echo(reports_as_json([report]))
    if not passed:
        raise typer.Exit(EXIT_FAILED)


def _read(settings: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        values |= parse_override(setting)
    return values
