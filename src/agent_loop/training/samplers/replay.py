"""Groups of earlier steps that may be trained again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agent_loop.recording.serialization import deserialize_trajectories, serialize_trajectories
from agent_loop.recording.values import Unstorable, pack, unpack
from agent_loop.trajectory import Segment, Trajectory
from agent_loop.types import Row

logger = logging.getLogger(__name__)

_REPLAY = 3
"""Part of the seed that separates the draws of groups from other draws with the same seed."""


class StoredGroup(NamedTuple):
    """Group of an earlier step, as bytes, so that a resumed run replays the same values as a run that never stopped."""

    step: int
    group: int
    """Number of the group in its step."""
    row: int
    """Index of its row in the data set."""
    oldest_version: int
    """Smallest weight version of its sampled tokens."""
    is_selected: bool
    """Whether a step has selected it. A group is replayed once."""
    data: bytes


class ReplayBuffer:
    """Groups of the last steps.

    Args:
        max_age: Maximum age of a replayed token, in weight versions.
        seed: Seed of the selection.
    """

    def __init__(self, *, max_age: int, seed: int) -> None:
        self._max_age = max_age
        self._seed = seed
        self._groups: dict[tuple[int, int], StoredGroup] = {}

    def add(self, step: int, trajectories: Sequence[Trajectory], *, row: int) -> None:
        """Add a group with a signal. A group with values that cannot be stored is left out, with a warning."""
        versions = [
            segment.weight_version
            for trajectory in trajectories
            for segment in trajectory.output.segments
            if segment.weight_version is not None
        ]
        rollouts: dict[int, list[Trajectory]] = {}
        for trajectory in trajectories:
            rollouts.setdefault(trajectory.rollout, []).append(trajectory)
        try:
            data = pack(
                [
                    [rollout, serialize_trajectories(branches, find_episode=_no_episode)]
                    for rollout, branches in rollouts.items()
                ]
            )
        except Unstorable as error:
            logger.warning(
                "group %d of step %d cannot be replayed: it contains %s", trajectories[0].group, step, error
            )
            return
        group = trajectories[0].group
        self._groups[step, group] = StoredGroup(
            step, group, row, min(versions, default=step - 1), False, data
        )

    def select(self, step: int, *, count: int, last_step: int) -> list[tuple[int, int]]:
        """Select groups for a step at random, at most `count`, and return their keys: step and group.

        Args:
            step: The step that trains them.
            count: Number of groups wanted.
            last_step: Last step whose groups may be selected.
        """
        keys = sorted(
            key
            for key, group in self._groups.items()
            if group.step <= last_step
            and not group.is_selected
            and step - 1 - group.oldest_version <= self._max_age
        )
        random = np.random.default_rng([self._seed, step, _REPLAY])
        order: list[int] = random.permutation(len(keys))[:count].tolist()
        selected = [keys[index] for index in order]
        for key in selected:
            self._groups[key] = self._groups[key]._replace(is_selected=True)
        return selected

    def trajectories(self, key: tuple[int, int], *, rows: Sequence[Row], group: int) -> list[Trajectory]:
        """Return the trajectories of a group, under another number."""
        stored = self._groups[key]
        return [
            trajectory
            for rollout, form in unpack(stored.data)
            for trajectory in deserialize_trajectories(
                form, episodes={}, row=rows[stored.row], group=group, rollout=rollout
            )
        ]

    def drop(self, keys: Iterable[tuple[int, int]]) -> None:
        """Drop groups that have been replayed."""
        for key in keys:
            self._groups.pop(key, None)

    def drop_old(self, step: int) -> None:
        """Drop the groups that are too old for a step and all later ones."""
        kept = {
            key: group
            for key, group in self._groups.items()
            if step - 1 - group.oldest_version <= self._max_age
        }
        self._groups = kept

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the groups as plain values."""
        return [group._asdict() for group in self._groups.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Load the groups that `state_dict` returned."""
        self._groups = {(group["step"], group["group"]): StoredGroup(**group) for group in state}


def _no_episode(segments: Sequence[Segment]) -> None:
    """Return no episode, so that the tokens are stored with the trajectories."""
