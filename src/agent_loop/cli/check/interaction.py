"""`agent-loop check interaction`: check the interactions of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agent_loop.cli.arguments import ConfigArgument, OverridesArgument, read_config
from agent_loop.cli.check.options import EXIT_FAILED, CheckTimeoutOption, JsonOption
from agent_loop.config import Config
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.checks import CheckReport
    from agent_loop.interactions.base import BaseInteraction
    from agent_loop.types import Row


def check_interaction_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    name: Annotated[
        str | None, typer.Option("--name", help="Check only the interaction with this name.")
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Option(
            "--answer",
            help="Message of the model. Give one per turn. By default a text, a number and a text.",
        ),
    ] = None,
    timeout_s: CheckTimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Check that the interactions of a configuration follow the contract of interactions.

    The checks cover replies, scores, isolation of trajectories, cancellation and clean-up. Checks that do not apply are
    skipped. Each interaction gets the arguments of the first row that names it. Exit code 1 if a check failed.

    Examples:

        agent-loop check interaction config.yaml

        agent-loop check interaction config.yaml --name gsm8k --answer "#### 41" --answer "#### 42"
    """
    from agent_loop.testing.rendering import reports_as_json  # late: keeps `--help` quick

    settings = read_config(config, overrides)
    console = Console(stderr=as_json)
    reports = run_to_end(_check(settings, name=name, answers=answers, timeout_s=timeout_s, console=console))
    if as_json:
        typer.echo(reports_as_json(reports))
    if any(report.failures for report in reports):
        raise typer.Exit(EXIT_FAILED)


async def _check(
    config: Config, *, name: str | None, answers: Sequence[str] | None, timeout_s: float, console: Console
) -> list[CheckReport]:
    # late: keeps `--help` quick
    from agent_loop.checks import check_interaction
    from agent_loop.testing.rendering import print_counts, result_printer

    reports: list[CheckReport] = []
    rows = _first_rows(config)
    for interaction in _select_interactions(config, name=name):
        row = rows.get(interaction.name)
        console.print(f"[bold]{interaction.name}[/]" + ("" if row else " (no row of the data names it)"))
        options: dict[str, Any] = {"answers": answers} if answers else {}
        if row is not None:
            options |= {"interaction_kwargs": row["interaction_kwargs"], "prompt": row["raw_prompt"]}
        report = await check_interaction(
            interaction, **options, timeout_s=timeout_s, on_result=result_printer(console)
        )
        print_counts(report, console)
        reports.append(report)
    return reports


def _select_interactions(config: Config, *, name: str | None) -> list[BaseInteraction]:
    from agent_loop.interactions.registry import PATH_KEY, load_interactions

    interactions = load_interactions(config.rollout.multi_turn.interaction_config_path)
    if not interactions:
        raise ConfigError(f"the configuration has no interactions; give their file in {PATH_KEY}")
    if name is None:
        return list(interactions.values())
    if name not in interactions:
        raise ConfigError(f"there is no interaction {name!r}{did_you_mean(name, interactions)}")
    return [interactions[name]]


def _first_rows(config: Config) -> Mapping[str, Row]:
    """Return the first row that names each interaction. Empty if the configuration has no data."""
    from agent_loop.rollout.rows import load_rows

    data = config.data
    sources = [*data.train_files, *data.val_files]
    rows = load_rows(sources, prompt_key=data.prompt_key, workspace=data.workspace) if sources else []
    first: dict[str, Row] = {}
    for row in rows:
        kwargs: Mapping[str, Any] | None = row.get("interaction_kwargs")
        if kwargs and kwargs.get("name"):
            first.setdefault(str(kwargs["name"]), row)
    return first
