"""`agent-loop rescore`: score stored trajectories with another reward function."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agent_loop.cli.arguments import (
    EXIT_FAILED,
    RunArgument,
    SplitOption,
    StepOption,
    find_run,
    finite,
    nothing_stored,
)
from agent_loop.cli.verbosity import look_at, print_hint, print_line
from agent_loop.errors import ConfigError, OutputError, RewardError
from agent_loop.rewards.function import (
    BatchRewardFunction,
    RewardFunction,
    ScoreResult,
    load_batch_reward,
    load_reward,
)
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.storage.columns import to_json, to_trajectory
from agent_loop.storage.exclusive import exclusive_file
from agent_loop.storage.run import StoredRun
from agent_loop.storage.writer import write_rows
from agent_loop.trajectory import mean_over_rollouts
from agent_loop.types import StopReason

MAX_AT_ONCE = 32
UNSCORED = (StopReason.FAILED, StopReason.CANCELLED)


def rescore_command(
    run: RunArgument,
    *,
    reward: Annotated[
        str, typer.Option("--reward", help="Reward function, as `file.py:name` or `module:name`.")
    ],
    step: StepOption = None,
    split: SplitOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Parquet file for the trajectories with their new rewards.")
    ] = None,
    batch: Annotated[
        bool,
        typer.Option(
            "--batch", help="Call the function once for all trajectories of a row, as with `reward.batch`."
        ),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, callback=finite, help="Time limit of one call, in seconds.")
    ] = 60.0,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Maximum number of changed rewards to list.")
    ] = 20,
) -> None:
    """Score stored trajectories again with another reward function, without a model.

    The function is called as in training, with the output and row of each trajectory. With --batch it is called with
    those of all stored trajectories of a row. Images are passed as descriptions only. Trajectories that failed or were
    cancelled are not scored. Exit code 1 if the function failed for a trajectory.

    Examples:

        agent-loop rescore runs/train --reward task.py:reward

        agent-loop rescore runs/train --reward stricter.py:reward --step 12 --split val --limit 50

        agent-loop rescore runs/eval --reward task.py:reward --out rescored.parquet
    """
    if out is not None and out.suffix != ".parquet":
        raise ConfigError(f"--out is {str(out)!r}; give a file that ends in .parquet")
    function = (load_batch_reward if batch else load_reward)(reward, timeout_s=timeout_s)
    console, stored = Console(), StoredRun(find_run(run))
    rows = list(stored.rows(split=split, step=step))
    if not rows:
        raise nothing_stored(stored, step=step, split=split)
    least = stored.files()[0].success_threshold
    with nullcontext() if out is None else exclusive_file(out, name="--out"):
        results = run_to_end(_score_all(rows, function))
        console.print(_comparison(rows, results, threshold=least))
        _print_changes(rows, results, console, limit=limit)
        if out is not None:
            changed = [
                row
                | {
                    "reward": new.reward,
                    "reward_extra": to_json(new.extra),
                    "is_success": new.reward is not None and new.reward >= least,
                }
                for row, new in zip(rows, results, strict=True)
            ]
            try:
                write_rows(out, changed, success_threshold=least)
            except OSError as error:
                raise OutputError(
                    f"--out is {str(out)!r}, which cannot be written ({describe_error(error)})"
                ) from error
            print_line(console, f"{len(results)} trajectories in {out}")
            print_hint(console, look_at(out))
    if any(new.error for new in results):
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True, slots=True)
class NewReward:
    """Reward of a stored trajectory by the other function; the stored one if it was not scored."""

    answer: str
    reward: float | None
    extra: Mapping[str, Any]
    error: str = ""
    """Error of the function; empty if it returned a reward."""


async def _score_all(
    rows: Sequence[Mapping[str, Any]], function: RewardFunction | BatchRewardFunction
) -> list[NewReward]:
    calls = asyncio.Semaphore(MAX_AT_ONCE)
    trajectories = [to_trajectory(row) for row in rows]
    results = [NewReward(t.output.answer, t.reward, t.reward_extra) for t in trajectories]
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        if trajectory.output.stop_reason not in UNSCORED:
            is_single = isinstance(function, RewardFunction)
            groups[place if is_single else (row["split"], row["step"], row["group"])].append(place)

    async def score(places: Sequence[int]) -> None:
        outputs = [trajectories[place].output for place in places]
        of_rows = [trajectories[place].row for place in places]
        async with calls:
            try:
                if isinstance(function, RewardFunction):
                    found = [ScoreResult(await function(outputs[0], of_rows[0]))]
                else:
                    found = await function(outputs, of_rows)
            except RewardError as error:
                found = [ScoreResult(error=error)] * len(places)
        for place, result in zip(places, found, strict=True):
            old = results[place]
            if result.score is None:
                error = describe_error(result.error or RewardError())
                results[place] = NewReward(old.answer, None, old.extra, error)
            else:
                results[place] = NewReward(old.answer, result.score.reward, result.score.extra)

    await run_together(score(places) for places in groups.values())
    return results


def _comparison(
    rows: Sequence[Mapping[str, Any]], results: Sequence[NewReward], *, threshold: float
) -> Table:
    """Return a table of old and new scores of rollouts.

    The branches of a rollout share its weight. A rollout is a success if one of its branches is.
    """
    keys = [
        (
            row["split"],
            row["step"],
            row["group"],
            row["rollout"],
            row["branch"] is None and row["trajectory_id"],
        )
        for row in rows
    ]
    old, new = [row["reward"] for row in rows], [result.reward for result in results]
    was_success = [bool(row["is_success"]) for row in rows]
    is_success = [reward is not None and reward >= threshold for reward in new]
    means = [mean_over_rollouts(zip(keys, rewards, strict=True)) for rewards in (old, new)]
    shares = [
        len({key for key, flag in zip(keys, flags, strict=True) if flag}) / len(set(keys))
        for flags in (was_success, is_success)
    ]
    table = Table("", "old", "new", box=None)
    table.add_row("mean reward", *("-" if mean is None else f"{mean:.4f}" for mean in means))
    table.add_row("success", *(f"{share:.1%}" for share in shares))
    table.add_row("scored", *(str(sum(reward is not None for reward in rewards)) for rewards in (old, new)))
    return table


def _print_changes(
    rows: Sequence[Mapping[str, Any]], results: Sequence[NewReward], console: Console, *, limit: int
) -> None:
    pairs = zip(rows, results, strict=True)
    changed = [(row, new) for row, new in pairs if row["reward"] != new.reward]
    console.print(f"{len(changed)} of {len(rows)} trajectories differ", highlight=False)
    for row, new in changed[:limit]:
        answer = " ".join(new.answer.split())[:60]
        rewards = " -> ".join("none" if each is None else f"{each:g}" for each in (row["reward"], new.reward))
        line = f"  {row['split']} step {row['step']} {row['trajectory_id']}  {rewards}  "
        print_line(console, line + (new.error or repr(answer)))
    if len(changed) > limit:
        console.print(f"  ... and {len(changed) - limit} more (--limit)", highlight=False)
