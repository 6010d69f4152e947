"""`agent-loop rescore`: score stored trajectories with another reward function."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from agent_loop.cli.verbosity import print_hint, print_line
from agent_loop.errors import ConfigError, OutputError, RewardError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.storage.exclusive import exclusive_file
from agent_loop.trajectory import Trajectory, mean_over_rollouts
from agent_loop.types import StopReason

if TYPE_CHECKING:
    from agent_loop.rewards.function import BatchRewardFunction, RewardFunction, ScoreResult

MAX_AT_ONCE = 32
UNSCORED = (StopReason.FAILED, StopReason.CANCELLED)


@dataclass(frozen=True, slots=True, eq=False)
class Rescored:
    """Stored trajectory, and its reward by another function."""

    stored: Mapping[str, Any]
    answer: str
    reward: float | None
    extra: Mapping[str, Any]
    error: str = ""
    """Error of the function; empty if it returned a reward."""

    @property
    def rollout(self) -> Hashable:
        """Key of the rollout that the trajectory belongs to."""
        where = tuple(self.stored[name] for name in ("split", "step", "group", "rollout"))
        return where if self.stored["branch"] is not None else (*where, self.stored["trajectory_id"])


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
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            callback=finite,
            help="Least reward that counts as a success; by default that of the run.",
        ),
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
    # late: keeps `--help` quick
    from agent_loop.rewards.function import load_batch_reward, load_reward
    from agent_loop.storage.run import StoredRun
    from agent_loop.storage.writer import rewrite_scores

    if out is not None and out.suffix != ".parquet":
        raise ConfigError(f"--out is {str(out)!r}; give a file that ends in .parquet")
    function = (load_batch_reward if batch else load_reward)(reward, timeout_s=timeout_s)
    console, stored = Console(), StoredRun(find_run(run))
    rows = list(stored.rows(split=split, step=step))
    if not rows:
        raise nothing_stored(stored, step=step, split=split)
    least = stored.files()[0].success_threshold if threshold is None else threshold
    with nullcontext() if out is None else exclusive_file(out, name="--out"):
        rescored = run_to_end(_score_all(rows, function))
        console.print(_comparison(rescored, threshold=least))
        _print_changes(rescored, console, limit=limit)
        if out is not None:
            scores = [(each.reward, each.extra) for each in rescored]
            try:
                rewrite_scores(out, rows, scores, success_threshold=least)
            except OSError as error:
                raise OutputError(
                    f"--out is {str(out)!r}, which cannot be written ({describe_error(error)})"
                ) from error
            print_line(console, f"{len(rescored)} trajectories in {out}")
            print_hint(
                console,
                f"look at them with: agent-loop view {out}, or in the terminal: agent-loop show {out}",
            )
    if any(each.error for each in rescored):
        raise typer.Exit(EXIT_FAILED)


async def _score_all(
    rows: Sequence[Mapping[str, Any]], function: RewardFunction | BatchRewardFunction
) -> list[Rescored]:
    from agent_loop.rewards.function import RewardFunction
    from agent_loop.runtime.concurrency import run_together
    from agent_loop.storage.columns import to_trajectory

    calls = asyncio.Semaphore(MAX_AT_ONCE)
    trajectories = [to_trajectory(row) for row in rows]
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        if trajectory.output.stop_reason not in UNSCORED:
            is_single = isinstance(function, RewardFunction)
            groups[place if is_single else (row["split"], row["step"], row["group"])].append(place)
    verdicts: dict[int, ScoreResult] = {}

    async def score(places: Sequence[int]) -> None:
        async with calls:
            found = await _verdicts([trajectories[place] for place in places], function)
        verdicts.update(zip(places, found, strict=True))

    await run_together(score(places) for places in groups.values())
    return [
        _rescored(row, trajectory, verdicts.get(place))
        for place, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True))
    ]


async def _verdicts(
    trajectories: Sequence[Trajectory], function: RewardFunction | BatchRewardFunction
) -> list[ScoreResult]:
    """Call the function once."""
    from agent_loop.rewards.function import RewardFunction, ScoreResult

    try:
        if isinstance(function, RewardFunction):
            [trajectory] = trajectories
            return [ScoreResult(await function(trajectory.output, trajectory.row))]
        return await function([t.output for t in trajectories], [t.row for t in trajectories])
    except RewardError as error:
        return [ScoreResult(error=error) for _ in trajectories]


def _rescored(row: Mapping[str, Any], trajectory: Trajectory, verdict: ScoreResult | None) -> Rescored:
    answer = trajectory.output.answer
    if verdict is None:
        return Rescored(row, answer, trajectory.reward, trajectory.reward_extra)
    if verdict.score is None:
        error = describe_error(verdict.error or RewardError())
        return Rescored(row, answer, None, trajectory.reward_extra, error)
    return Rescored(row, answer, verdict.score.reward, verdict.score.extra)


def _comparison(rescored: Sequence[Rescored], *, threshold: float) -> Table:
    """Return a table of old and new scores of rollouts.

    The branches of a rollout share its weight. A rollout is a success if one of its branches is.
    """
    keys = [each.rollout for each in rescored]
    old, new = [each.stored["reward"] for each in rescored], [each.reward for each in rescored]
    was_success = [bool(each.stored["is_success"]) for each in rescored]
    is_success = [reward is not None and reward >= threshold for reward in new]
    table = Table("", "old", "new", box=None)
    table.add_row("mean reward", *(_mean(zip(keys, rewards, strict=True)) for rewards in (old, new)))
    table.add_row("success", *(f"{_share(keys, flags):.1%}" for flags in (was_success, is_success)))
    table.add_row("scored", *(str(sum(reward is not None for reward in rewards)) for rewards in (old, new)))
    return table


def _mean(rewards: Iterable[tuple[Hashable, float | None]]) -> str:
    mean = mean_over_rollouts(rewards)
    return "-" if mean is None else f"{mean:.4f}"


def _share(keys: Sequence[Hashable], flags: Sequence[bool]) -> float:
    """Return the share of rollouts with a trajectory that has the flag."""
    return len({key for key, flag in zip(keys, flags, strict=True) if flag}) / len(set(keys))


def _print_changes(rescored: Sequence[Rescored], console: Console, *, limit: int) -> None:
    changed = [each for each in rescored if each.stored["reward"] != each.reward]
    console.print(f"{len(changed)} of {len(rescored)} trajectories differ", highlight=False)
    for each in changed[:limit]:
        row, answer = each.stored, " ".join(each.answer.split())[:60]
        old, new = ("none" if value is None else f"{value:g}" for value in (row["reward"], each.reward))
        line = f"  {row['split']} step {row['step']} {row['trajectory_id']}  {old} -> {new}  "
        print_line(console, line + (each.error or repr(answer)))
    if len(changed) > limit:
        console.print(f"  ... and {len(changed) - limit} more (--limit)", highlight=False)
