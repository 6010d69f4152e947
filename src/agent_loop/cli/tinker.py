"""`agent-loop tinker`: serve the Tinker API."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agent_loop.cli.arguments import (
    EXIT_BY_SIGNAL,
    AllowedHostOption,
    HostOption,
    PortOption,
    refuse_no_model,
)
from agent_loop.errors import ConfigError
from agent_loop.runtime.event_loop import run_to_end

NEEDS = ("google.protobuf", "peft", "starlette", "uvicorn", "zstandard")


def tinker_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub name.")],
    *,
    name: Annotated[
        str | None,
        typer.Option("--as", help="Name of the model in requests.", show_default="MODEL as it is given"),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder of the journal and of the checkpoints.")
    ] = Path("runs/tinker"),
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", help="Key that clients must send, which begins with `tml-`. Any by default."
        ),
    ] = None,
    allowed_host: AllowedHostOption = None,
    engines: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Snapshots that are sampled from at once. Each is a copy of the model."
        ),
    ] = 2,
    max_model_len: Annotated[
        int,
        typer.Option(min=2, max=2**24, help="Maximum tokens of prompt and completion together in sampling."),
    ] = 2048,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Sample each completion by itself, with the same bits in every order."
        ),
    ] = False,
) -> None:
    """Serve the Tinker API: recipes of the cookbook, and other clients of its SDK, train and sample on this machine.

    All clients train low-rank adapters of one model, in float32. A server that was killed continues with the same
    `--dir`. Ctrl-C stops it.

    Examples:

        agent-loop tinker model

        agent-loop tinker models/Qwen3-0.6B --as Qwen/Qwen3-0.6B --dir runs/tinker
    """
    if any(find_spec(package) is None for package in NEEDS):
        raise ConfigError('agent-loop tinker needs: pip install "agent-loop[tinker]"')
    refuse_no_model(model)

    from agent_loop.integrations.tinker.command import (  # late: the extra is optional, and `--help` stays quick
        TinkerOptions,
        serve,
    )

    options = TinkerOptions(
        model=model,
        name=name or model,
        folder=folder,
        host=host,
        port=port,
        api_key=api_key,
        allowed_hosts=allowed_host or (),
        engines=engines,
        max_model_len=max_model_len,
        deterministic=deterministic,
    )
    stopped_by = run_to_end(serve(options, console=Console()))
    if stopped_by is not None:
        raise typer.Exit(EXIT_BY_SIGNAL + stopped_by)
