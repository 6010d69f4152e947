"""Forks of a training step: new continuations of its trajectories, as branches, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from msgspec import structs

from agent_loop.config.algorithm import ForkConfig
from agent_loop.rollout.forks import FORKED_TURN, Fork, as_branches, find_forks, own_segments
from agent_loop.rollout.journal.step import StepJournal
from agent_loop.training.metrics import (
    FORK_CONTINUATIONS,
    FORK_LOST_SHARE,
    FORK_NEWER_SHARE,
    FORK_REFUSED,
    FORK_STATES,
    FORK_TOKEN_SHARE,
    FORK_TOKENS,
    FORK_VALUE_SHIFT,
)
from agent_loop.training.progress import Progress
from agent_loop.trajectory import Trajectory, group_branches, mean_reward


class ForkRunner(Protocol):
    """The part of `AgentLoopManager` that samples continuations. The method is documented there."""

    async def run_forks(
        self,
        forks: Sequence[Fork],
        *,
        n: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        journal: StepJournal | None = None,
        label: str = "",
    ) -> list[Trajectory]: ...


@dataclass(frozen=True, slots=True)
class Forked:
    """Continuations of the trajectories of a step."""

    branches: Sequence[Trajectory] = ()
    """Scored continuations, as branches of the rollouts that they fork."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


NOT_FORKED = Forked()


class StepForks:
    """Samples the continuations of steps."""

    def __init__(
        self,
        config: ForkConfig,
        *,
        runner: ForkRunner,
        progress: Progress,
        open_journal: Callable[[Sequence[Fork]], AbstractAsyncContextManager[StepJournal | None]],
    ) -> None:
        self._config = config
        self._runner = runner
        self._progress = progress
        self._open_journal = open_journal

    async def run(
        self, trajectories: Sequence[Trajectory], *, label: str, origin: Callable[[int], tuple[str, int]]
    ) -> Forked:
        """Continue trajectories anew."""
        forks, reasons = find_forks(trajectories, config=self._config, origin=origin)
        if reasons and not forks:
            self._progress.say(f"{label}: no trajectory can be forked; {reasons[0]}")
        n = self._config.continuations
        continuations: list[Trajectory] = []
        if forks:
            async with self._open_journal(forks) as journal:
                with self._progress.rollout(num_trajectories=len(forks) * n) as note:
                    continuations = await self._runner.run_forks(
                        forks, n=n, on_trajectory=note, journal=journal, label=f"{label}/forks"
                    )
        branches = as_branches(forks, continuations)
        metrics = fork_metrics(trajectories, forks, continuations, branches)
        return Forked(branches, metrics | {FORK_REFUSED: float(len(reasons))})


def with_branches(trajectories: Sequence[Trajectory], branches: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Return trajectories, with number 0 for those that have branches, so that shared tokens are trained once."""
    forked = {(branch.group, branch.rollout) for branch in branches}
    return [structs.replace(t, branch=0) if (t.group, t.rollout) in forked else t for t in trajectories]


def fork_metrics(
    trajectories: Sequence[Trajectory],
    forks: Sequence[Fork],
    continuations: Sequence[Trajectory],
    branches: Sequence[Trajectory],
) -> dict[str, float]:
    """Return the cost of the continuations of a step, and what their values change."""
    sampled = [
        (len(segment), (segment.weight_version or 0) > _last_version(forks[each.group]))
        for each in continuations
        for segment in own_segments(forks[each.group], each)
    ]
    num_tokens = sum(length for length, _ in sampled)
    num_all = num_tokens + sum(t.output.num_model_tokens for t in trajectories)
    metrics = {
        FORK_STATES: float(len(forks)),
        FORK_CONTINUATIONS: float(len(continuations)),
        FORK_TOKENS: float(num_tokens),
        FORK_TOKEN_SHARE: num_tokens / max(num_all, 1),
    }
    if continuations:
        num_newer = sum(length for length, is_newer in sampled if is_newer)
        metrics[FORK_LOST_SHARE] = 1 - len(branches) / len(continuations)
        metrics[FORK_NEWER_SHARE] = num_newer / max(num_tokens, 1)
    if branches:
        metrics[FORK_VALUE_SHIFT] = _value_shift(trajectories, branches)
    return metrics


def _value_shift(trajectories: Sequence[Trajectory], branches: Sequence[Trajectory]) -> float:
    of_groups: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in group_branches(trajectories):
        reward = mean_reward(rollout)
        if reward is not None:
            of_groups[rollout[0].group].append(reward)
    of_states: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for branch in branches:
        turn = int(branch.output.extra_fields[FORKED_TURN])
        of_states[branch.group, branch.rollout, turn].append(branch.reward or 0.0)
    return fmean(abs(fmean(rewards) - fmean(of_groups[key[0]])) for key, rewards in of_states.items())


def _last_version(fork: Fork) -> int:
    versions = [segment.weight_version for segment in fork.trajectory.output.segments]
    return next((version for version in reversed(versions) if version is not None), 0)
