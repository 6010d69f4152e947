"""`agent-loop rollout`: run rows and write the trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from agent_loop.cli.arguments import (
    JSON_LINES,
    ConfigArgument,
    DataOption,
    JsonLinesOption,
    MaxRowsOption,
    ModelOption,
    OverridesArgument,
    SamplesOption,
    read_config,
    read_rows,
)
from agent_loop.cli.dry_run import DryRunOption, check_before
from agent_loop.cli.rollout_file import RolloutFile
from agent_loop.cli.running import by_id, run_rows
from agent_loop.cli.verbosity import print_hint
from agent_loop.errors import AgentLoopError, ConfigError
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.storage.exclusive import exclusive_file
from agent_loop.trajectory import Trajectory, group_branches, mean_reward


def rollout_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File for the trajectories.", show_default="trajectories.parquet"),
    ] = None,
    jsonl: JsonLinesOption = False,
    model: ModelOption = None,
    data: DataOption = None,
    max_rows: MaxRowsOption = None,
    n: SamplesOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume a run with this `--out` that was stopped or killed.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run agent loops on rows and write their trajectories: tokens, masks, log-probs, messages, rewards.

    Examples:

        agent-loop rollout config.yaml

        agent-loop rollout config.yaml --data rows.jsonl --max-rows 8 -n 4 --out sampled.parquet

        agent-loop rollout config.yaml --data 'shards/train-*.parquet' --data saved:train

        agent-loop rollout config.yaml --jsonl --out sampled.jsonl

        agent-loop rollout config.yaml --out sampled.parquet --resume

        agent-loop rollout config.yaml --model runs/train/checkpoints/step-000040/model rollout.temperature=0.7
    """
    as_jsonl = jsonl or (out is not None and out.suffix in JSON_LINES)
    out = out or Path("trajectories.jsonl" if jsonl else "trajectories.parquet")
    if out.is_dir():
        raise ConfigError(
            f"--out is {str(out)!r}, which is a folder; give a file, such as {out / 'sampled.parquet'}"
        )
    settings = read_config(config, overrides, model=model)
    rows = read_rows(settings, data=data, max_rows=max_rows)
    if check_before(settings, rows=rows, is_dry_run=dry_run):
        return
    console, target = Console(), RolloutFile(out, settings, as_jsonl)
    if resume:
        target.require_journal()
    with exclusive_file(out, name="--out"):
        if not resume:
            target.keep_earlier_journal(console)
        finished: list[Trajectory] = []
        try:
            trajectories = run_to_end(
                run_rows(
                    settings,
                    rows=rows,
                    n=n,
                    validate=False,
                    console=console,
                    on_trajectory=finished.append,
                    journal_path=target.journal if settings.rollout.journal else None,
                    resume=resume,
                )
            )
        except (KeyboardInterrupt, AgentLoopError):
            if finished:
                target.write(sorted(finished, key=by_id))
                console.print(
                    f"stopped; the {len(finished)} finished trajectories are in {out}", markup=False
                )
            if target.journal.is_file():
                console.print("resume with --resume", markup=False)
            raise
        target.write(trajectories)
        target.journal.unlink(missing_ok=True)
    console.print(_summary(trajectories))
    console.print(f"{len(trajectories)} trajectories in {out}", markup=False, soft_wrap=True)
    print_hint(
        console, f"look at them with: agent-loop view {out}, or in the terminal: agent-loop show {out}"
    )


def _summary(trajectories: Sequence[Trajectory]) -> Table:
    table = Table(
        Column("ended with", no_wrap=True),
        Column("trajectories", no_wrap=True),
        "mean reward",
        "mean response tokens",
    )
    for reason, count in Counter(t.output.stop_reason for t in trajectories).most_common():
        ended = [t for t in trajectories if t.output.stop_reason is reason]
        means = [
            reward for branches in group_branches(ended) if (reward := mean_reward(branches)) is not None
        ]
        mean = f"{sum(means) / len(means):.3f}" if means else "-"
        mean_tokens = sum(len(t.output.response_ids) for t in ended) / count
        table.add_row(reason, str(count), mean, f"{mean_tokens:.0f}")
    return table
