"""`agent-loop check-sandbox`: what would shut in the code of the python tool on this machine?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from agent_loop.cli.checking import EXIT_FAILED
from agent_loop.config import parse_section
from agent_loop.errors import SandboxError
from agent_loop.files.plain_values import parse_override

if TYPE_CHECKING:
    from agent_loop.tools.sandbox.settings import Mechanism, SandboxSettings

COLOURS = {"taken": "green", "works": "green", "too weak": "red", "fails": "red"}


def check_sandbox_command(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="The tool's settings.", show_default=False),
    ] = None,
) -> None:
    """Try every way to shut code in, and say what each one holds.

    Each runs one sandbox that attempts what it must not be able to do. `taken` is what the python tool would use; exit
    code 1 if there is none.

    Examples:

        agent-loop check-sandbox

        agent-loop check-sandbox python=/usr/bin/python3 mechanism=landlock
    """
    from agent_loop.tools.sandbox.settings import MECHANISMS, SandboxSettings  # late: keeps `--help` quick

    given = parse_section(SandboxSettings, _read(settings or []), where="the settings given")
    names = MECHANISMS if given.mechanism == "auto" else (given.mechanism,)
    console, is_taken = Console(), False
    for name in names:
        verdict, detail = _try(name, settings=given)
        if verdict == "works" and not is_taken:
            verdict, is_taken = "taken", True
        line = Text.assemble((f"{verdict:8}", COLOURS[verdict]), f"  {name:10}  {detail}")
        console.print(line, soft_wrap=True)
    if not is_taken:
        raise typer.Exit(EXIT_FAILED)


def _try(mechanism: Mechanism, *, settings: SandboxSettings) -> tuple[str, str]:
    from agent_loop.tools.sandbox.host import make_source, try_source

    source = make_source(settings, mechanism=mechanism)
    try:
        isolation = try_source(source)
    except SandboxError as error:
        return "fails", str(error)
    finally:
        source.close()
    is_enough = isolation.has_minimum or settings.allow_weaker_isolation
    return "works" if is_enough else "too weak", isolation.describe()


def _read(settings: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        values |= parse_override(setting)
    return values
