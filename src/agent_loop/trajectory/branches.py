"""Rollouts and their branches: statistics count a rollout once, however many trajectories its loop returned."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

from agent_loop.trajectory.output import Trajectory

SEAT = "seat"
"""Key of `extra_fields` with the seat of a trajectory, in games of several players."""


def group_branches(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the branches of each rollout, in the order of their first ones.

    Trajectories without a branch number are rollouts of their own.
    """
    rollouts: dict[tuple[int, ...], list[Trajectory]] = {}
    for number, trajectory in enumerate(trajectories):
        rollouts.setdefault(_key(trajectory, number), []).append(trajectory)
    return list(rollouts.values())


def without_lost(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories that infrastructure did not fail. The others say nothing about the policy."""
    return [t for t in trajectories if t.output.failure is None or not t.output.failure.is_infrastructure]


def branch_weights(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return for each trajectory 1 divided by the number of branches of its rollout."""
    keys = [_key(trajectory, number) for number, trajectory in enumerate(trajectories)]
    counts = Counter(keys)
    return [1 / counts[key] for key in keys]


def mean_reward(branches: Sequence[Trajectory]) -> float | None:
    """Return the reward of a rollout: the mean of those of its scored branches; None if nothing scored any."""
    rewards = [t.reward for t in branches if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def seat_of(trajectory: Trajectory) -> Hashable | None:
    """Return the seat of a trajectory in its game. Rewards of different seats cannot be compared.

    None if the trajectory is of no game.
    """
    seat = trajectory.output.extra_fields.get(SEAT)
    return seat if isinstance(seat, int | str) else None


def mean_over_rollouts(values: Iterable[tuple[Hashable | None, float | None]]) -> float | None:
    """Return the mean over rollouts of the mean of their values; None if there are no values.

    Args:
        values: For each trajectory, what its rollout is known by, and the value. None in the first place is a rollout
            with one trajectory; None in the second place counts for nothing.
    """
    per_rollout: defaultdict[Hashable, list[float]] = defaultdict(list)
    for number, (key, value) in enumerate(values):
        if value is not None:
            per_rollout[(number,) if key is None else (0, key)].append(value)
    means = [sum(each) / len(each) for each in per_rollout.values()]
    return sum(means) / len(means) if means else None


def _key(trajectory: Trajectory, number: int) -> tuple[int, ...]:
    is_alone = trajectory.branch is None
    return (
        (trajectory.group, trajectory.rollout, number) if is_alone else (trajectory.group, trajectory.rollout)
    )
