"""`agent-loop check server`: check the engine of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agent_loop.cli.arguments import ConfigArgument, ModelOption, OverridesArgument, finite, read_config
from agent_loop.cli.check.options import EXIT_FAILED, CheckTimeoutOption, JsonOption
from agent_loop.config import Config
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.checks import CheckReport, Reference

CLOSE_TIMEOUT_S = 30.0


def check_server_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    model: ModelOption = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference/--no-reference",
            help="Also load the model with transformers, and compare tokens and log-probs with it.",
        ),
    ] = True,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Largest accepted difference of log-probs, in nats: 1e-3 for float32, 0.1 for bfloat16.",
        ),
    ] = 1e-3,
    timeout_s: CheckTimeoutOption = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Start one server of the configuration and check that it follows the contract of servers.

    The checks cover tokens, log-probs, stop reasons, abort, concurrency, sessions, invalid requests, sleep and weight
    updates. Checks of abilities that the server does not claim are skipped. The weights of the server are changed
    during the checks: do not run them on a server that others use. Exit code 1 if a check failed.

    Examples:

        agent-loop check server config.yaml

        agent-loop check server config.yaml rollout.engine=vllm

        agent-loop check server config.yaml rollout.engine=my_engine:MyServer --json
    """
    from agent_loop.testing.rendering import reports_as_json  # late: keeps `--help` quick

    settings = read_config(config, overrides, model=model)
    console = Console(stderr=as_json)
    report = run_to_end(
        _check(settings, with_reference=reference, tolerance=tolerance, timeout_s=timeout_s, console=console)
    )
    if as_json:
        typer.echo(reports_as_json([report]))
    if report.failures:
        raise typer.Exit(EXIT_FAILED)


async def _check(
    config: Config, *, with_reference: bool, tolerance: float, timeout_s: float, console: Console
) -> CheckReport:
    # late: keeps `--help` quick
    from agent_loop.checks import Reference, check_server, vocab_size_of
    from agent_loop.servers.factory import create_servers
    from agent_loop.testing.rendering import print_counts, result_printer

    rollout = config.rollout.model_copy(
        update={"num_servers": 1, "server_urls": config.rollout.server_urls[:1]}
    )
    (server,) = create_servers(config.model, rollout=rollout)
    trust = config.model.trust_remote_code
    reference: Reference | None = None
    if with_reference:
        reference = Reference.load(config.model.path, trust_remote_code=trust)
    try:
        await server.start()
        report = await check_server(
            server,
            max_model_len=rollout.prompt_length + rollout.response_length,
            vocab_size=vocab_size_of(config.model.path, trust_remote_code=trust),
            reference=reference,
            tolerance=tolerance,
            timeout_s=timeout_s,
            on_result=result_printer(console),
        )
    finally:
        await run_shielded(server.close, timeout_s=CLOSE_TIMEOUT_S)
    print_counts(report, console)
    return report
