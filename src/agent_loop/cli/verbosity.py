"""The options `-v` and `-q`, which every command has."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

LOGGER = "agent_loop"
OPTIONS: dict[str, Any] = {
    "verbose": Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            help="Print the log, and whole tracebacks of errors; -vv prints more.",
        ),
    ],
    "quiet": Annotated[
        bool, typer.Option("-q", "--quiet", help="Print results and errors alone: no progress, no hints.")
    ],
}
DEFAULTS: dict[str, Any] = {"verbose": 0, "quiet": False}


@dataclass(slots=True)
class Verbosity:
    """How much the command of this process prints."""

    verbose: int = 0
    quiet: bool = False
    handler: logging.Handler | None = None
    """Handler of the log, if the command prints it."""


VERBOSITY = Verbosity()
LINE = logging.Formatter("%(levelname)s %(name)s: %(message)s")


def add_verbosity(app: typer.Typer) -> None:
    """Give `-v` and `-q` to every command of an app and of the apps in it."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = _with_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_verbosity(group.typer_instance)
            itself = group.typer_instance.registered_callback
            if (
                itself is not None
                and itself.callback is not None
                and group.typer_instance.info.invoke_without_command is True
            ):
                itself.callback = _with_options(itself.callback)


def set_verbosity(*, verbose: int, quiet: bool) -> None:
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


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    hints = {**get_type_hints(command, include_extras=True), **OPTIONS}
    parameters = [
        *inspect.signature(command).parameters.values(),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in DEFAULTS.items()
        ),
    ]

    def run(*, verbose: int, quiet: bool, **arguments: Any) -> Any:
        set_verbosity(verbose=verbose, quiet=quiet)
        return command(**arguments)

    described: Any = update_wrapper(run, command)
    del described.__wrapped__  # typer would read its signature
    described.__annotations__ = hints
    described.__signature__ = inspect.Signature(
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    )
    return run
