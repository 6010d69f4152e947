"""`agent-loop check model`: check how a model may be served and trained."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import Console

from agent_loop.cli.check.options import EXIT_FAILED, CheckTimeoutOption, JsonOption
from agent_loop.runtime.event_loop import run_to_end


def check_model_command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Folder or hub name of the model.", show_default=False)
    ],
    *,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Type to compute in; `auto` is that of the files."),
    ] = "auto",
    max_model_len: Annotated[
        int, typer.Option(min=32, help="Context in tokens. Attention windows that are shorter are crossed.")
    ] = 2048,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code of the model's folder.")] = False,
    timeout_s: CheckTimeoutOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Compare the caches of the embedded engine and the batches of the trainer with the model's plain forward.

    The engine and the trainer pick from a table of model types, which the tests of this package prove, and compute
    other types in the plain way. This command compares all ways for one model. Exit code 1 if a way that the table
    has for the type is not exact.

    Examples:

        agent-loop check model ./my_model

        agent-loop check model ./my_model --dtype float32 --max-model-len 512
    """
    # late: keeps `--help` quick
    from agent_loop.checks import check_model
    from agent_loop.servers.embedded.vision import auto_model_class
    from agent_loop.testing.rendering import print_counts, reports_as_json, result_printer

    console = Console(stderr=as_json)
    loader = auto_model_class(path, trust_remote_code=trust_remote_code)
    model = loader.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    report = run_to_end(
        check_model(
            model, max_model_len=max_model_len, timeout_s=timeout_s, on_result=result_printer(console)
        )
    )
    print_counts(report, console)
    if as_json:
        typer.echo(reports_as_json([report]))
    if report.failures:
        raise typer.Exit(EXIT_FAILED)
