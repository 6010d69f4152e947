"""Rollouts and their branches: statistics count a rollout once, however many trajectories its loop returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agent_loop.trajectory.output import Trajectory


def group_branches(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the branches of each rollout, in the order of their first ones.

    Trajectories without a branch number are rollouts of their own.
    """
    rollouts: dict[tuple[int, ...], list[Trajectory]] = {}
    for number, trajectory in enumerate(trajectories):
        rollouts.setdefault(_key(trajectory, number), []).append(trajectory)
    return list(rollouts.values())


def branch_weights(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return for each trajectory 1 divided by the number of branches of its rollout."""
    keys = [_key(trajectory, number) for number, trajectory in enumerate(trajectories)]
    counts = Counter(keys)
    return [1 / counts[key] for key in keys]


def mean_reward(branches: Sequence[Trajectory]) -> float | None:
    """Return the reward of a rollout: the mean of those of its scored branches; None if nothing scored any."""
    rewards = [t.reward for t in branches if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _key(trajectory: Trajectory, number: int) -> tuple[int, ...]:
    is_alone = trajectory.branch is None
    return (
        (trajectory.group, trajectory.rollout, number) if is_alone else (trajectory.group, trajectory.rollout)
    )
