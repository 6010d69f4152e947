"""`agent-loop check-server`: does a configuration's engine keep the contract of servers?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agent_loop.cli.arguments import (
    CheckTimeoutOption,
    ConfigArgument,
    ModelOption,
    OverridesArgument,
    finite,
    read_config,
)
from agent_loop.cli.checking import EXIT_FAILED, print_counts, printer
from agent_loop.config import Config
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.servers.check import CheckReport, Reference

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
            help="Load the model with transformers as well, and compare tokens and log-probs with it.",
        ),
    ] = True,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, callback=finite, help="Of log-probs, in nats: 1e-3 for float32, 0.1 for bfloat16."
        ),
    ] = 1e-3,
    timeout_s: CheckTimeoutOption = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Start one server of the configuration and try every sentence of the contract on it.

    Tokens, log-probs, stop reasons, abort, concurrency, sessions, refusals, sleep and weight updates. What the server
    does not claim is skipped. Its weights are changed on the way: do not point this at a server that others use. Exit
    code 1 if a check failed.

    Examples:

        agent-loop check-server config.yaml

        agent-loop check-server config.yaml rollout.engine=vllm

        agent-loop check-server config.yaml rollout.engine=my_engine:MyServer --json
    """
    settings = read_config(config, overrides, model=model)
    console = Console(stderr=as_json)
    report = run_to_end(
        _check(settings, with_reference=reference, tolerance=tolerance, timeout_s=timeout_s, console=console)
    )
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in report.results], indent=2))
    if report.failures:
        raise typer.Exit(EXIT_FAILED)


async def _check(
    config: Config, *, with_reference: bool, tolerance: float, timeout_s: float, console: Console
) -> CheckReport:
    from agent_loop.servers.check import Reference, check_server, vocab_size_of  # late: keeps `--help` quick
    from agent_loop.servers.factory import create_servers

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
            on_result=printer(console),
        )
    finally:
        await run_shielded(server.close, timeout_s=CLOSE_TIMEOUT_S)
    print_counts(report, console)
    return report
