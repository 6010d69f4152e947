"""Groups from which an estimator that compares within groups can learn."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache

from agent_loop.config import AlgorithmConfig
from agent_loop.config.algorithm import OUTCOME
from agent_loop.runtime.numeric import as_reward
from agent_loop.training.advantages.sources import SOURCE
from agent_loop.trajectory import Trajectory, group_branches
from agent_loop.trajectory.branches import seat_of


def with_variance(trajectories: Sequence[Trajectory], *, algorithm: AlgorithmConfig) -> list[Trajectory]:
    """Return the trajectories of groups in which several rollouts are scored and not all rewards are equal.

    In games, this holds for a seat of the group. With `gdpo`, it holds for one of `algorithm.reward_parts` with a
    weight.
    """
    values: defaultdict[tuple[int, Hashable], set[float]] = defaultdict(set)
    num_scored: Counter[tuple[int, Hashable]] = Counter()
    of_source = cache(algorithm.of_source)
    for branches in group_branches(trajectories):
        compared = [
            ((trajectory.group, (seat_of(trajectory), name)), value)
            for trajectory in branches
            for name, value in _compared(trajectory, of_source=of_source)
        ]
        for key, value in compared:
            values[key].add(value)
        num_scored.update({key for key, _ in compared})
    groups = {key[0] for key, found in values.items() if num_scored[key] > 1 and len(found) > 1}
    return [t for t in trajectories if t.group in groups]


def _compared(
    trajectory: Trajectory, *, of_source: Callable[[str | None], AlgorithmConfig]
) -> Iterator[tuple[str, float]]:
    """Yield the names and values that the estimator of a trajectory compares; nothing if it is not scored."""
    if trajectory.reward is None:
        return
    source = trajectory.row.get(SOURCE)
    settings = of_source(source if isinstance(source, str) else None)
    parts = settings.reward_parts if settings.adv_estimator == "gdpo" else {OUTCOME: 1.0}
    returned, fields = trajectory.reward_extra, trajectory.output.extra_fields
    for name in parts:
        value = trajectory.reward if name == OUTCOME else as_reward(returned.get(name, fields.get(name)))
        if value is not None and parts[name]:
            yield name, value
