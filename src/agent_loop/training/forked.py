"""Forks of a training step: new continuations of its trajectories, as branches, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from msgspec import structs

from agent_loop.rollout.forks import FORKED_TURN, Fork, own_segments
from agent_loop.training import metrics as names
from agent_loop.trajectory import Trajectory, group_branches, mean_reward


@dataclass(frozen=True, slots=True)
class Forked:
    """Continuations of the trajectories of a step."""

    branches: Sequence[Trajectory] = ()
    """Scored continuations, as branches of the rollouts that they fork."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


NOT_FORKED = Forked()


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
        names.FORK_STATES: float(len(forks)),
        names.FORK_CONTINUATIONS: float(len(continuations)),
        names.FORK_TOKENS: float(num_tokens),
        names.FORK_TOKEN_SHARE: num_tokens / max(num_all, 1),
    }
    if continuations:
        num_newer = sum(length for length, is_newer in sampled if is_newer)
        metrics[names.FORK_LOST_SHARE] = 1 - len(branches) / len(continuations)
        metrics[names.FORK_NEWER_SHARE] = num_newer / max(num_tokens, 1)
    if branches:
        metrics[names.FORK_VALUE_SHIFT] = _value_shift(trajectories, branches)
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
