"""Batches of tensors: padded, or nested without padding.

Shapes: B rows, P prompt width, R response width, W = P + R. N tokens in all, M of them in responses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict

from agent_loop.config import RolloutConfig
from agent_loop.errors import DataError
from agent_loop.rollout.flat_tokens import FlatTokens, IndexArray
from agent_loop.trajectory import AgentLoopMetrics, Trajectory, branch_weights
from agent_loop.trajectory.attachments import position_ids

RolloutBatch: TypeAlias = TensorDict
"""Result of `assemble`, whose docstring lists the columns."""

TENSOR_COLUMNS = (
    "prompts",
    "responses",
    "response_mask",
    "input_ids",
    "attention_mask",
    "position_ids",
    "multi_modal_position_ids",
    "rollout_log_probs",
    "weight_versions",
    "turn_rewards",
    "has_turn_reward",
    "reward",
    "is_scored",
    "group",
    "rollout",
    "branch",
    "num_turns",
    "__num_turns__",
)
JAGGED_COLUMNS = (*TENSOR_COLUMNS, "prompt_length", "response_length")


def make_batch(
    trajectories: Sequence[Trajectory], *, config: RolloutConfig, pad_token_id: int
) -> RolloutBatch:
    """Return the batch, padded as `rollout.pad_to` says, with the timing metrics in `batch["timing"]`."""
    fixed = config.pad_to == "limits"
    batch = (
        assemble_jagged(trajectories)
        if config.pad_to == "none"
        else assemble(
            trajectories,
            pad_token_id=pad_token_id,
            prompt_width=config.prompt_length if fixed else None,
            response_width=config.response_length if fixed else None,
        )
    )
    batch.set_non_tensor("timing", timing_metrics(trajectories))
    return batch


def assemble(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> RolloutBatch:
    """Return a batch of padded trajectories, in the order given.

    Args:
        trajectories: Any number, including none.
        pad_token_id: Token id of the padding.
        prompt_width: P; None is the longest prompt.
        response_width: R; None is the longest response.

    Returns:
        int64: `input_ids` [B, W], and its views `prompts` [B, P], padded left, and `responses` [B, R], padded right;
        `response_mask` [B, R] (1 = sampled by the model; 0 for tokens that a grammar forced; in segments that branches
        share, 1 in the first scored branch only), `attention_mask`, `position_ids` [B, W] (0 where there is no token),
        `group`, `rollout`, `branch` (-1 where the loop returned a single output), `num_turns` [B], also under
        verl's name `__num_turns__`; if a trajectory has images with positions of their own, also
        `multi_modal_position_ids` [B, 3, W] in time, height and width.
        int32: `weight_versions` [B, R], -1 where no model sampled the token. float32: `reward` [B], NaN where there is
        none, and `rollout_log_probs` [B, R], 0 where no model sampled the token; the key is absent unless every sampled
        token has one. Rewards of turns, of tools and of the interaction: float32 `turn_rewards` [B, R], their sum at
        the last token of the turn that earned them and 0 elsewhere, and bool `has_turn_reward` [B, R], which tells a
        reward of 0 from none; a branch has those of the turns it shares too. bool: `is_scored` [B]. Objects:
        `stop_reason`, `trajectory_id`, `feedback` where any trajectory has some (a tuple of `Feedback`), `data_source`
        where any row has one, and one column for each name that any trajectory has in `reward_extra` or `extra_fields`,
        None where it lacks it. A name that is taken already gets the prefix `reward_extra.` or `extra_fields.`.
        `attachments`, where any trajectory has some: for each row a tuple of them, counted from its first token. One
        tensor [B, R, ...] for each array that every sampled token has in `Segment.extras`, under its name and of its
        type, 0 in segments that are not trained on; `extras.{name}` if the name is taken.

    Raises:
        DataError: A prompt or a response is longer than the width given.
    """
    flat = FlatTokens(trajectories)
    prompt_width = _width(
        flat.prompt_lengths_B, prompt_width, trajectories=trajectories, what="prompt", key="prompt_length"
    )
    response_width = _width(
        flat.response_lengths_B,
        response_width,
        trajectories=trajectories,
        what="response",
        key="response_length",
    )
    whole_B, first_B = flat.lengths_B, prompt_width - flat.prompt_lengths_B
    whole, response = (len(first_B), prompt_width + response_width), (len(first_B), response_width)
    input_ids = _padded(
        flat.token_ids_N, whole_B, first_B=first_B, shape=whole, dtype=np.int64, fill=pad_token_id
    )
    position_ids_BW = np.arange(whole[1]) - first_B[:, None]
    is_token_BW = (position_ids_BW >= 0) & (position_ids_BW < whole_B[:, None])
    columns: dict[str, NDArray[Any]] = {
        "prompts": input_ids[:, :prompt_width],
        "responses": input_ids[:, prompt_width:],
        "input_ids": input_ids,
        "attention_mask": is_token_BW.astype(np.int64),
        "position_ids": position_ids_BW * is_token_BW,
    }
    for name, values_M, fill in _response_values(flat, taken=TENSOR_COLUMNS):
        columns[name] = _padded(
            values_M,
            flat.response_lengths_B,
            first_B=np.zeros_like(first_B),
            shape=(*response, *values_M.shape[1:]),
            dtype=values_M.dtype,
            fill=fill,
        )
    columns |= _turn_columns(trajectories, width=response_width) | _row_columns(trajectories)
    if any(a.positions is not None for t in trajectories for a in t.output.attachments):
        columns["multi_modal_position_ids"] = _positions_in_3d(
            trajectories, first_B=first_B, width=prompt_width + response_width
        )
    batch = TensorDict(
        {name: as_tensor(array) for name, array in columns.items()}, batch_size=[len(trajectories)]
    )
    _set_objects(batch, trajectories, taken={*TENSOR_COLUMNS, *columns})
    return batch


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
        `assemble`, with values [N, ...]. Also int64 `prompt_length` and `response_length`
        [B], and the columns [B] of `assemble`.
    """
    flat = FlatTokens(trajectories)
    offsets = torch.zeros(len(trajectories) + 1, dtype=torch.int64)
    offsets[1:] = as_tensor(np.cumsum(flat.lengths_B))

    def nested(values_N: NDArray[Any]) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(as_tensor(values_N), offsets)

    counted_N = _counted(flat.lengths_B)
    is_response_N = counted_N >= np.repeat(flat.prompt_lengths_B, flat.lengths_B)
    columns: dict[str, Any] = {
        "input_ids": nested(flat.token_ids_N.astype(np.int64)),
        "position_ids": nested(counted_N),
        "prompt_length": as_tensor(flat.prompt_lengths_B),
        "response_length": as_tensor(flat.response_lengths_B),
    }
    for name, values_M, fill in _response_values(flat, taken=JAGGED_COLUMNS):
        values_N = np.full((len(is_response_N), *values_M.shape[1:]), fill, values_M.dtype)
        values_N[is_response_N] = values_M
        columns[name] = nested(values_N)
    columns |= {name: as_tensor(values_B) for name, values_B in _row_columns(trajectories).items()}
    batch = TensorDict(columns, batch_size=[len(trajectories)])
    _set_objects(batch, trajectories, taken={*JAGGED_COLUMNS, *columns})
    return batch


def timing_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the seconds per trajectory and the numbers of preemptions: minimum, maximum, mean, and the slowest row.

    The mean is over rollouts, whose branches share their weight. The slowest is the one with most seconds of generation
    and tools together. No trajectories, no metrics.
    """
    if not trajectories:
        return {}
    each = [t.output.metrics for t in trajectories]
    columns = {
        name: [float(getattr(m, name)) for m in each]
        for name in ("generate_sequences", "tool_calls", "num_preempted")
    }
    weights = branch_weights(trajectories)
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics[f"agent_loop/{name}/min"] = min(values)
        metrics[f"agent_loop/{name}/max"] = max(values)
        metrics[f"agent_loop/{name}/mean"] = float(np.dot(values, weights)) / sum(weights)
    busy_s = np.add(columns["generate_sequences"], columns["tool_calls"])
    slowest = int(np.argmax(busy_s))
    for name, values in columns.items():
        metrics[f"agent_loop/slowest/{name}"] = values[slowest]
    output = trajectories[slowest].output
    metrics["agent_loop/slowest/prompt_length"] = float(len(output.prompt_ids))
    metrics["agent_loop/slowest/response_length"] = float(len(output.response_ids))
    return metrics | _lag_metrics(each)


def _lag_metrics(each: Sequence[AgentLoopMetrics]) -> dict[str, float]:
    """Return the lag of the event loops: maximum, mean, and the share of time in which one was blocked."""
    return {
        "timing/event_loop_lag_max_s": max([m.event_loop_lag_max for m in each]),
        "timing/event_loop_lag_mean_s": sum([m.event_loop_lag_mean for m in each]) / len(each),
        "timing/event_loop_late_share": sum([m.event_loop_late_share for m in each]) / len(each),
    }


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of a writable array."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _response_values(flat: FlatTokens, *, taken: Collection[str]) -> Iterator[tuple[str, NDArray[Any], int]]:
    """Yield each column with a value per token of the responses: name, values [M, ...], and the value elsewhere."""
    yield "response_mask", flat.is_model_M.astype(np.int64), 0
    yield "weight_versions", flat.weight_versions_M, -1
    logprobs_M = flat.logprobs_M
    if logprobs_M is not None:
        yield "rollout_log_probs", logprobs_M, 0
    for name in flat.extra_names:
        yield f"extras.{name}" if name in taken else name, flat.extra_M(name), 0


def _counted(lengths_B: IndexArray) -> IndexArray:
    """Return the position of each token in its row, shape [N]."""
    starts_B = np.cumsum(lengths_B) - lengths_B
    return np.arange(int(lengths_B.sum())) - np.repeat(starts_B, lengths_B)


def _padded(
    values: NDArray[Any],
    lengths_B: IndexArray,
    *,
    first_B: IndexArray,
    shape: tuple[int, ...],
    dtype: Any,
    fill: int = 0,
) -> NDArray[Any]:
    """Return a column of `fill` with a run of the values in each row. `first_B` is the position of each run."""
    padded = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)
    end = 0
    for row, first, length in zip(padded, first_B.tolist(), lengths_B.tolist(), strict=True):
        start, end = end, end + length
        row[first : first + length] = values[start:end]
    return padded


def _positions_in_3d(
    trajectories: Sequence[Trajectory], *, first_B: IndexArray, width: int
) -> NDArray[np.int64]:
    """Shape [B, 3, W]; 0 where there is no token."""
    positions = np.zeros((len(trajectories), 3, width), np.int64)
    for row, (trajectory, first) in enumerate(zip(trajectories, first_B.tolist(), strict=True)):
        output = trajectory.output
        num_tokens = sum(map(len, output.segments))
        if num_tokens:
            positions[row, :, first : first + num_tokens] = position_ids(num_tokens, output.attachments)
    return positions


def _turn_columns(trajectories: Sequence[Trajectory], *, width: int) -> dict[str, NDArray[Any]]:
    shape = (len(trajectories), width)
    rewards_BR, has_reward_BR = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    for row, trajectory in enumerate(trajectories):
        for feedback in trajectory.output.feedback:
            if feedback.reward is not None and feedback.place is not None:
                rewards_BR[row, feedback.place] += feedback.reward
                has_reward_BR[row, feedback.place] = True
    return {"turn_rewards": rewards_BR, "has_turn_reward": has_reward_BR}


def _width(
    lengths_B: IndexArray, width: int | None, *, trajectories: Sequence[Trajectory], what: str, key: str
) -> int:
    longest = int(lengths_B.max(initial=0))
    if width is None:
        return longest
    if longest > width:
        row = int(np.argmax(lengths_B > width))
        raise DataError(
            f"the {what} of {trajectories[row].trajectory_id} has {lengths_B[row]} tokens, over the batch's width of "
            f"{width}; raise rollout.{key}, or set rollout.pad_to=longest"
        )
    return width


def _row_columns(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
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


def _set_objects(batch: TensorDict, trajectories: Sequence[Trajectory], *, taken: Collection[str]) -> None:
    """Add the columns of objects to a batch. A name that is taken gets a prefix."""
    for name, values in _object_columns(trajectories, taken=taken).items():
        batch.set(name, NonTensorStack(*values))


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
