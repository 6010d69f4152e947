"""`agent-loop rollout`: run rows and write the trajectories."""

from __future__ import annotations

import tempfile
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
from agent_loop.cli.running import DryRunOption, by_id, check_rollout, run_rows
from agent_loop.cli.verbosity import look_at, print_hint, print_line
from agent_loop.errors import AgentLoopError, ConfigError, JournalError, OutputError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.storage.exclusive import exclusive_file
from agent_loop.storage.json_lines import write_lines
from agent_loop.storage.writer import write_trajectories
from agent_loop.trajectory import Trajectory, group_branches, mean_reward

SPLIT = "rollout"


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
    check_rollout(settings, rows=rows, is_dry_run=dry_run)
    if dry_run:
        return
    console, journal = Console(), out.with_name(f"{out.name}.journal")
    if resume and not journal.is_file():
        raise JournalError(
            f"there is no journal {str(journal)!r} to resume from; run the command without --resume"
        )
    threshold = settings.reward.success_threshold
    with exclusive_file(out, name="--out"):
        if not resume:
            _keep_earlier_journal(journal, out=out, console=console)
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
                    journal_path=journal if settings.rollout.journal else None,
                    resume=resume,
                )
            )
        except (KeyboardInterrupt, AgentLoopError):
            if finished:
                in_order = sorted(finished, key=by_id)
                _write(out, in_order, journal=journal, as_jsonl=as_jsonl, threshold=threshold)
                print_line(console, f"stopped; the {len(finished)} finished trajectories are in {out}")
            if journal.is_file():
                print_line(console, "resume with --resume")
            raise
        _write(out, trajectories, journal=journal, as_jsonl=as_jsonl, threshold=threshold)
        journal.unlink(missing_ok=True)
    console.print(_summary(trajectories))
    print_line(console, f"{len(trajectories)} trajectories in {out}")
    print_hint(console, look_at(out))


def _keep_earlier_journal(journal: Path, *, out: Path, console: Console) -> None:
    """Rename the journal of an earlier, incomplete rollout, so that it is not overwritten."""
    if not journal.exists():
        return
    number, kept = 1, journal
    while kept.exists():
        kept, number = journal.with_name(f"{journal.name}.before-{number}"), number + 1
    journal.rename(kept)
    print_line(
        console,
        f"an earlier rollout into {out} is incomplete; its journal is now {kept}. To resume that rollout, rename its "
        f"journal to {journal.name} and run with --resume",
    )


def _write(
    out: Path, trajectories: Sequence[Trajectory], *, journal: Path, as_jsonl: bool, threshold: float
) -> None:
    """Write the trajectories."""
    try:
        if as_jsonl:
            write_lines(out, trajectories, split=SPLIT)
        else:
            write_trajectories(out, trajectories, step=0, split=SPLIT, success_threshold=threshold)
    except Exception as error:
        if journal.is_file():
            kept = (
                f"in the journal {str(journal)!r}. Free the disk or correct the permissions, and run the same command "
                "with --resume; no trajectory is run again"
            )
        else:
            spare = Path(tempfile.mkdtemp(prefix="agent-loop-rollout-")) / f"{out.stem}.jsonl"
            write_lines(spare, trajectories, split=SPLIT)
            kept = f"in {str(spare)!r}, as JSON lines"
        raise OutputError(
            f"--out is {str(out)!r}, which cannot be written ({describe_error(error)}); the trajectories are {kept}"
        ) from error


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
