"""The options `-v` and `-q`, which every command has."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

LOGGER = "agent_loop"


@dataclass(slots=True)
class Verbosity:
    """How much the command of this process prints."""

    verbose: int = 0
    quiet: bool = False
    handler: logging.Handler | None = None
    """Handler of the log, if the command prints it."""


VERBOSITY = Verbosity()
LINE = logging.Formatter("%(levelname)s %(name)s: %(message)s")


def set_verbosity(
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            help="Print the log, and whole tracebacks of errors; -vv prints more.",
        ),
    ] = 0,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print results and errors alone: no progress, no hints.")
    ] = False,
) -> None:
    """Set how much the command prints: its log, and its progress and hints."""
    if verbose and quiet:
        raise typer.BadParameter("-v and -q exclude each other; give one of them")
    VERBOSITY.verbose, VERBOSITY.quiet = verbose, quiet
    logger = logging.getLogger(LOGGER)
    if VERBOSITY.handler is not None:
        logger.removeHandler(VERBOSITY.handler)
        VERBOSITY.handler = None
    logger.setLevel(logging.ERROR if quiet else logging.NOTSET)
    if verbose:
        logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
        VERBOSITY.handler = logging.StreamHandler()
        VERBOSITY.handler.setFormatter(LINE)
        logger.addHandler(VERBOSITY.handler)


_app = typer.Typer(add_completion=False)
_app.command()(set_verbosity)
_OPTIONS: list[Any] = typer.main.get_command(_app).params


class VerbosityOptions:
    """Part of a command that takes `-v` and `-q`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params: list[Any] = [*self.params, *_OPTIONS]

    def invoke(self, ctx: Any) -> Any:
        set_verbosity(verbose=ctx.params.pop("verbose"), quiet=ctx.params.pop("quiet"))
        return super().invoke(ctx)  # pyright: ignore


class Command(VerbosityOptions, TyperCommand):
    """Command with `-v` and `-q`."""


class Group(VerbosityOptions, TyperGroup):
    """Group that is a command of its own, with `-v` and `-q`."""


def add_verbosity(app: typer.Typer) -> None:
    """Give `-v` and `-q` to every command of an app and of the apps in it."""
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        inner = group.typer_instance
        if inner is not None:
            add_verbosity(inner)
            if inner.info.invoke_without_command is True:
                inner.info.cls = Group


def print_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a text as it is: without markup, and on one line of any length."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def print_hint(console: Console, text: str) -> None:
    """Print what to do next, unless the command is quiet."""
    if not VERBOSITY.quiet:
        print_line(console, text)


def look_at(path: Path) -> str:
    """Return the hint for a file of trajectories."""
    return f"look at them with: agent-loop view {path}, or in the terminal: agent-loop show {path}"
