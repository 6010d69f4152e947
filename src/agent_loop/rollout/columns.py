"""Columns of a batch with one value for each of B rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict

from agent_loop.trajectory import Trajectory


def row_columns(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Return the numeric columns, shape [B]."""
    num_turns = np.array([t.output.num_turns for t in trajectories], np.int64)
    return {
        "reward": np.array([np.nan if t.reward is None else t.reward for t in trajectories], np.float32),
        "is_scored": np.array([t.reward is not None for t in trajectories], np.bool_),
        "group": np.array([t.group for t in trajectories], np.int64),
        "rollout": np.array([t.rollout for t in trajectories], np.int64),
        "branch": np.array([-1 if t.branch is None else t.branch for t in trajectories], np.int64),
        "num_turns": num_turns,
        "__num_turns__": num_turns,
    }


def set_objects(batch: TensorDict, trajectories: Sequence[Trajectory], *, taken: Collection[str]) -> None:
    """Add the columns of objects to a batch. A name that is taken gets a prefix."""
    for name, values in _object_columns(trajectories, taken=taken).items():
        batch.set(name, NonTensorStack(*values))


def extra_column(name: str, *, taken: Collection[str]) -> str:
    """Return the name of the column of an extra: its own name, or `extras.{name}` if a column has that name."""
    return f"extras.{name}" if name in taken else name


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of a writable array."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _object_columns(trajectories: Sequence[Trajectory], *, taken: Collection[str]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "stop_reason": [t.output.stop_reason.value for t in trajectories],
        "trajectory_id": [t.trajectory_id for t in trajectories],
    }
    if any(t.output.attachments for t in trajectories):
        columns["attachments"] = [t.output.attachments for t in trajectories]
    if any(t.output.feedback for t in trajectories):
        columns["feedback"] = [t.output.feedback for t in trajectories]
    if any("data_source" in t.row for t in trajectories):
        columns["data_source"] = [t.row.get("data_source") for t in trajectories]
    sources: dict[str, list[Mapping[str, Any]]] = {
        "reward_extra": [t.reward_extra for t in trajectories],
        "extra_fields": [t.output.extra_fields for t in trajectories],
    }
    for source, mappings in sources.items():
        used = {*taken, *columns}
        for name in dict.fromkeys(chain.from_iterable(mappings)):
            column = f"{source}.{name}" if name in used else name
            columns[column] = [mapping.get(name) for mapping in mappings]
    return columns
