"""Batches of padded tensors. B rows, P prompt width, R response width, W = P + R."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict

from agent_loop.config import RolloutConfig
from agent_loop.errors import DataError
from agent_loop.trajectory import AgentLoopMetrics, Trajectory, branch_weights
from agent_loop.trajectory.attachments import position_ids
from agent_loop.types import Origin

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


def make_batch(
    trajectories: Sequence[Trajectory], *, config: RolloutConfig, pad_token_id: int
) -> RolloutBatch:
    """Return the batch, padded as `rollout.pad_to` says, with the timing metrics in `batch["timing"]`."""
    fixed = config.pad_to == "limits"
    batch = assemble(
        trajectories,
        pad_token_id=pad_token_id,
        prompt_width=config.prompt_length if fixed else None,
        response_width=config.response_length if fixed else None,
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
    outputs = [t.output for t in trajectories]
    prompt_width = _width(
        [len(o.prompt_ids) for o in outputs], prompt_width, trajectories, what="prompt", key="prompt_length"
    )
    response_width = _width(
        [len(o.response_ids) for o in outputs],
        response_width,
        trajectories,
        what="response",
        key="response_length",
    )
    num_rows, width = len(outputs), prompt_width + response_width
    input_ids_BW = np.full((num_rows, width), pad_token_id, np.int64)
    attention_mask_BW = np.zeros((num_rows, width), np.int64)
    for row, output in enumerate(outputs):
        first, end = prompt_width - len(output.prompt_ids), prompt_width + len(output.response_ids)
        input_ids_BW[row, first:prompt_width] = output.prompt_ids
        input_ids_BW[row, prompt_width:end] = output.response_ids
        attention_mask_BW[row, first:end] = 1
    columns: dict[str, NDArray[Any]] = {
        "prompts": input_ids_BW[:, :prompt_width],
        "responses": input_ids_BW[:, prompt_width:],
        "input_ids": input_ids_BW,
        "attention_mask": attention_mask_BW,
        "position_ids": (attention_mask_BW.cumsum(axis=1) - 1) * attention_mask_BW,
        **_response_columns(trajectories, width=response_width),
        **_row_columns(trajectories),
    }
    if any(a.positions is not None for o in outputs for a in o.attachments):
        columns["multi_modal_position_ids"] = _positions_in_3d(
            trajectories, prompt_width=prompt_width, width=width
        )
    batch = TensorDict({name: as_tensor(array) for name, array in columns.items()}, batch_size=[num_rows])
    for name, values in _object_columns(trajectories, taken={*TENSOR_COLUMNS, *columns}).items():
        batch.set(name, NonTensorStack(*values))
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


def _response_columns(trajectories: Sequence[Trajectory], *, width: int) -> dict[str, NDArray[Any]]:
    """Return the columns with a value for each token of the responses."""
    shape = (len(trajectories), width)
    columns: dict[str, NDArray[Any]] = {
        "response_mask": np.zeros(shape, np.int64),
        "weight_versions": np.full(shape, -1, np.int32),
        "turn_rewards": np.zeros(shape, np.float32),
        "has_turn_reward": np.zeros(shape, np.bool_),
    }
    if all(t.output.response_logprobs is not None for t in trajectories):
        columns["rollout_log_probs"] = np.zeros(shape, np.float32)
    extras = _extra_columns(trajectories, shape=shape)
    trained: set[int] = set()
    for row, trajectory in enumerate(trajectories):
        output, end = trajectory.output, 0
        for segment in output.response_segments:
            start, end = end, end + len(segment)
            is_sampled = segment.origin is Origin.MODEL and len(segment) > 0
            if is_sampled and id(segment) not in trained:  # else another branch trains it
                columns["response_mask"][row, start:end] = output.response_mask[start:end]
                for name, values in extras.items():
                    values[row, start:end] = segment.extras[name]
        if trajectory.branch is not None and trajectory.reward is not None:
            trained.update(map(id, output.response_segments))
        columns["weight_versions"][row, :end] = output.weight_versions
        if "rollout_log_probs" in columns:
            columns["rollout_log_probs"][row, :end] = output.response_logprobs
        for feedback in output.feedback:
            if feedback.reward is not None and feedback.place is not None:
                columns["turn_rewards"][row, feedback.place] += feedback.reward
                columns["has_turn_reward"][row, feedback.place] = True
    return columns | {
        f"extras.{name}" if name in TENSOR_COLUMNS else name: values for name, values in extras.items()
    }


def _extra_columns(trajectories: Sequence[Trajectory], *, shape: tuple[int, int]) -> dict[str, NDArray[Any]]:
    """Return a column of zeros for each extra that every sampled token has, with the same shape for all tokens."""
    segments = (s for t in trajectories for s in t.output.response_segments)
    first, *others = [s.extras for s in segments if s.origin is Origin.MODEL and len(s)] or [{}]
    columns: dict[str, NDArray[Any]] = {}
    for name, array in first.items():
        if all(name in other and other[name].shape[1:] == array.shape[1:] for other in others):
            dtype = np.result_type(array.dtype, *(other[name].dtype for other in others)).newbyteorder("=")
            columns[name] = np.zeros((*shape, *array.shape[1:]), dtype)
    return columns


def _positions_in_3d(
    trajectories: Sequence[Trajectory], *, prompt_width: int, width: int
) -> NDArray[np.int64]:
    """Shape [B, 3, W]; 0 where there is no token."""
    positions = np.zeros((len(trajectories), 3, width), np.int64)
    for row, trajectory in enumerate(trajectories):
        output = trajectory.output
        first, end = prompt_width - len(output.prompt_ids), prompt_width + len(output.response_ids)
        if first < end:
            positions[row, :, first:end] = position_ids(end - first, output.attachments)
    return positions


def _width(
    lengths: Sequence[int], width: int | None, trajectories: Sequence[Trajectory], *, what: str, key: str
) -> int:
    longest = max(lengths, default=0)
    if width is not None and longest > width:
        row = lengths.index(longest)
        raise DataError(
            f"the {what} of {trajectories[row].trajectory_id} has {longest} tokens, over the batch's width of {width}; "
            f"raise rollout.{key}, or set rollout.pad_to=longest"
        )
    return longest if width is None else width


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
