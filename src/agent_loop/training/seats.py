"""Groups of comparable rows: rollouts of the same prompt, and in games of the same seat."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.trajectory.branches import SEAT

COLUMNS = (f"extra_fields.{SEAT}", SEAT)
"""Names that the column of seats can have in a batch."""


def has_seats(batch: RolloutBatch) -> bool:
    """Return whether a batch has rows of games."""
    return any(isinstance(seat, int | str) for seat in _seats(batch))


def compared_groups(batch: RolloutBatch) -> Tensor:
    """Return for each row a number that it shares with the rows of its group and seat; int64 [B].

    It is the number of the group for rows without a seat.
    """
    groups_B: Tensor = batch["group"]
    if not has_seats(batch):
        return groups_B
    first, numbers, found = int(groups_B.max()) + 1, dict[tuple[int, Any], int](), list[int]()
    groups: list[int] = batch["group"].tolist()
    for group, seat in zip(groups, _seats(batch), strict=True):
        is_of_game = isinstance(seat, int | str)
        found.append(numbers.setdefault((group, seat), first + len(numbers)) if is_of_game else group)
    return torch.tensor(found, dtype=torch.int64)


def _seats(batch: RolloutBatch) -> list[Any]:
    names: set[str] = set(cast(Any, batch).keys())
    found: list[list[Any]] = [list(batch[name]) for name in COLUMNS if name in names]
    return found[0] if found else []
