"""`agent-loop check-interaction`: do a configuration's interactions keep their contract?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agent_loop.cli.arguments import CheckTimeoutOption, ConfigArgument, OverridesArgument, read_config
from agent_loop.cli.checking import EXIT_FAILED, print_counts, printer
from agent_loop.config import Config
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.interactions.base import BaseInteraction
    from agent_loop.testing.checks import CheckReport
    from agent_loop.types import Row


def check_interaction_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    name: Annotated[
        str | None, typer.Option("--name", help="Check this one alone, by the name that rows give.")
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Option(
            "--answer", help="What the model says; give it once per turn. Default: words, a number, words."
        ),
    ] = None,
    timeout_s: CheckTimeoutOption = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """Try every sentence of the contract on the interactions of a configuration.

    Each is started as the first row of the data that names it has it. Replies, scores, verdicts, isolation of
    trajectories, cancellation and clean-up; a sentence that does not apply is skipped. Exit code 1 if a check failed.

    Examples:

        agent-loop check-interaction config.yaml

        agent-loop check-interaction config.yaml --name gsm8k --answer "#### 41" --answer "#### 42"
    """
    settings = read_config(config, overrides)
    console = Console(stderr=as_json)
    reports = run_to_end(_check(settings, name=name, answers=answers, timeout_s=timeout_s, console=console))
    if as_json:
        printed = {report.subject: [asdict(result) for result in report.results] for report in reports}
        typer.echo(json.dumps(printed, indent=2))
    if any(report.failures for report in reports):
        raise typer.Exit(EXIT_FAILED)


async def _check(
    config: Config, *, name: str | None, answers: Sequence[str] | None, timeout_s: float, console: Console
) -> list[CheckReport]:
    from agent_loop.interactions.check import check_interaction  # late: keeps `--help` quick

    reports: list[CheckReport] = []
    rows = _first_rows(config)
    for interaction in _chosen(config, name=name):
        row = rows.get(interaction.name)
        console.print(f"[bold]{interaction.name}[/]" + ("" if row else " (no row of the data names it)"))
        asked: dict[str, Any] = {"answers": answers} if answers else {}
        if row is not None:
            asked |= {"interaction_kwargs": row["interaction_kwargs"], "prompt": row["raw_prompt"]}
        report = await check_interaction(
            interaction, **asked, timeout_s=timeout_s, on_result=printer(console)
        )
        print_counts(report, console)
        reports.append(report)
    return reports


def _chosen(config: Config, *, name: str | None) -> list[BaseInteraction]:
    from agent_loop.interactions.registry import PATH_KEY, load_interactions

    interactions = load_interactions(config.rollout.multi_turn.interaction_config_path)
    if not interactions:
        raise ConfigError(f"there are no interactions; name their file in {PATH_KEY}")
    if name is None:
        return list(interactions.values())
    if name not in interactions:
        raise ConfigError(f"there is no interaction {name!r}{did_you_mean(name, interactions)}")
    return [interactions[name]]


def _first_rows(config: Config) -> Mapping[str, Row]:
    """For each interaction the first row that names it; none without data."""
    from agent_loop.rollout.rows import load_rows

    sources = [*config.data.train_files, *config.data.val_files]
    rows = load_rows(sources, prompt_key=config.data.prompt_key) if sources else []
    first: dict[str, Row] = {}
    for row in rows:
        kwargs: Mapping[str, Any] | None = row.get("interaction_kwargs")
        if kwargs and kwargs.get("name"):
            first.setdefault(str(kwargs["name"]), row)
    return first
