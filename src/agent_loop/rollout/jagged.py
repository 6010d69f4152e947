"""Batches of nested tensors without padding, for trainers that pack rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from agent_loop.rollout.batch import TENSOR_COLUMNS, RolloutBatch
from agent_loop.rollout.columns import as_tensor, extra_column, row_columns, set_objects
from agent_loop.rollout.flat_tokens import FlatTokens
from agent_loop.trajectory import Trajectory

TAKEN = (*TENSOR_COLUMNS, "prompt_length", "response_length")


def assemble_jagged(trajectories: Sequence[Trajectory]) -> RolloutBatch:
    """Return a batch of nested tensors. Each row is a trajectory's prompt and response, in the given order.

    Args:
        trajectories: At least one trajectory.

    Returns:
        Nested tensors [B, lengths], which share their offsets: `batch["input_ids"].values()` is [N] and
        `.offsets()` [B + 1], the `cu_seqlens` of attention without padding. int64: `input_ids`, `position_ids` (each
        row from 0), `response_mask` (1 = sampled by the model; 0 for tokens that a grammar forced). int32:
        `weight_versions`, -1 where no model sampled the token. float32: `rollout_log_probs`, 0 where no model sampled
        the token; absent unless every sampled token has one. The extras of segments as in
        `agent_loop.rollout.batch.assemble`, with values [N, ...]. Also int64 `prompt_length` and `response_length`
        [B], and the columns [B] of `assemble`.
    """
    flat = FlatTokens(trajectories)
    offsets = torch.zeros(len(trajectories) + 1, dtype=torch.int64)
    offsets[1:] = as_tensor(np.cumsum(flat.lengths_B))
    columns: dict[str, Any] = {
        name: torch.nested.nested_tensor_from_jagged(as_tensor(values_N), offsets)
        for name, values_N in _token_columns(flat).items()
    }
    columns |= {name: as_tensor(values_B) for name, values_B in row_columns(trajectories).items()}
    columns["prompt_length"] = as_tensor(flat.prompt_lengths_B)
    columns["response_length"] = as_tensor(flat.response_lengths_B)
    batch = TensorDict(columns, batch_size=[len(trajectories)])
    set_objects(batch, trajectories, taken={*TAKEN, *columns})
    return batch


def _token_columns(flat: FlatTokens) -> dict[str, NDArray[Any]]:
    """Return the columns with one value per token, by name. Their shape is [N, ...]."""
    is_response_N = np.concatenate(
        [
            np.repeat((False, True), pair)
            for pair in zip(flat.prompt_lengths_B, flat.response_lengths_B, strict=True)
        ]
    )

    def of_responses(values_M: NDArray[Any], dtype: Any, fill: int = 0) -> NDArray[Any]:
        values_N = np.full((len(is_response_N), *values_M.shape[1:]), fill, dtype)
        values_N[is_response_N] = values_M
        return values_N

    lengths_B = flat.lengths_B
    starts_B = np.cumsum(lengths_B) - lengths_B
    columns: dict[str, NDArray[Any]] = {
        "input_ids": flat.token_ids_N.astype(np.int64),
        "position_ids": np.arange(len(is_response_N)) - np.repeat(starts_B, lengths_B),
        "response_mask": of_responses(flat.is_model_M, np.int64),
        "weight_versions": of_responses(flat.weight_versions_M, np.int32, -1),
    }
    logprobs_M = flat.logprobs_M
    if logprobs_M is not None:
        columns["rollout_log_probs"] = of_responses(logprobs_M, np.float32)
    for name in flat.extra_names:
        values_M = flat.extra_M(name)
        columns[extra_column(name, taken=TAKEN)] = of_responses(values_M, values_M.dtype)
    return columns
