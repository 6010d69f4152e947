"""Over-sampling: of more groups than are needed, the first ones to end."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from agent_loop.trajectory import Trajectory


class FirstGroups:
    """Collects trajectories until enough groups are complete.

    Args:
        count: Groups wanted.
        size: Rollouts of a group.
    """

    def __init__(self, count: int, *, size: int) -> None:
        self.are_complete = asyncio.Event()
        """Set when enough groups are."""
        self._count = count
        self._size = size
        self._groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
        self._complete: list[int] = []

    def add(self, trajectory: Trajectory) -> bool:
        """Takes a trajectory that has ended; tells whether its group may still be among those that are kept."""
        if len(self._complete) == self._count and trajectory.group not in self._complete:
            return False
        group = self._groups[trajectory.group]
        group.append(trajectory)
        if trajectory.group not in self._complete and len({t.rollout for t in group}) == self._size:
            self._complete.append(trajectory.group)
            if len(self._complete) == self._count:
                # Later, since the branches of one rollout come one right after the other.
                asyncio.get_running_loop().call_soon(self.are_complete.set)
        return True

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those of the complete groups, ordered by group, then rollout."""
        kept = [t for group in self._complete for t in self._groups[group]]
        return sorted(kept, key=lambda t: (t.group, t.rollout, t.branch or 0))
