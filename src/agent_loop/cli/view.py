"""`agent-loop view`: show a run in a local web page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agent_loop.cli.arguments import EXIT_BY_SIGNAL, HostOption, find_run
from agent_loop.cli.verbosity import print_line
from agent_loop.errors import ConfigError, DataError
from agent_loop.files.file_kinds import explain, find_runs

NEEDS = ("starlette", "uvicorn")


def view_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folder of a run or an evaluation, or file of trajectories; or several, or a folder of them.",
        ),
    ],
    *,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="Port to listen on; 0 is any free port.",
            show_default="first free port from 7321",
        ),
    ] = None,
    opens_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Write the page to one file that needs no server, and exit."),
    ] = None,
    max_trajectories: Annotated[
        int,
        typer.Option(
            "--max-trajectories", min=0, help="Maximum number of trajectories in the exported file."
        ),
    ] = 200,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            help="Server for forks of trajectories with an edited turn: the URL of a vLLM, SGLang or "
            "`agent-loop serve` server, or `run` for the engine in the settings of the run.",
        ),
    ] = None,
) -> None:
    """Show a run in the browser: metrics, trajectories token by token, groups side by side, and time spent.

    Several runs are shown together: a list, curves over each other, differences of settings, prompts and evaluations.
    The page updates while the run continues. It never changes the run, and loads nothing from other hosts.

    Examples:

        agent-loop view runs/demo/train

        agent-loop view runs

        agent-loop view evals/base evals/trained

        agent-loop view rollouts.jsonl --no-open --port 8080

        agent-loop view runs/demo/train --export report.html

        agent-loop view runs/demo/train --server http://127.0.0.1:8000
    """
    if any(find_spec(package) is None for package in NEEDS):
        raise ConfigError('agent-loop view needs: pip install "agent-loop[view]"')
    console = Console()
    are_several = export is None and server is None and _are_several(runs)
    if len(runs) > 1 and not are_several:
        option = "--export" if export is not None else "--server"
        raise ConfigError(f"{option} is for one run, and {len(runs)} are given; give one of them")
    shown = runs if are_several else [find_run(runs[0])]
    if export is not None:
        from agent_loop.viewer.export import write_export  # late: keeps `--help` quick

        print_line(console, write_export(shown[0], target=export, max_trajectories=max_trajectories))
        return
    from agent_loop.viewer.command import view  # late: the extra is optional, and `--help` is to be quick

    stopped_by = view(
        shown,
        host=host,
        port=port,
        opens_browser=opens_browser,
        console=console,
        are_several=are_several,
        server=server,
    )
    if stopped_by is not None:
        raise typer.Exit(EXIT_BY_SIGNAL + stopped_by)


def _are_several(paths: Sequence[Path]) -> bool:
    """Return whether the paths lead to several runs, or to a folder of runs, which may get more."""
    if len(paths) > 1:
        for path in paths:
            if not find_runs([path]) or not path.exists():
                raise DataError(explain(path, wanted="folders of runs or evaluations"))
    found = find_runs(paths)
    return len(found) > 1 or (len(found) == 1 and found[0] != paths[0])
