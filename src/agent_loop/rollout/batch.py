"""Trajectories to padded tensors, by their real lengths: one flat concatenation, one scatter per tensor.

Shapes: B rows, P prompt width, R response width, W = P + R.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict

from agent_loop.attachments import position_ids
from agent_loop.errors import DataError
from agent_loop.trajectory import Segment, Trajectory
from agent_loop.types import FloatArray, IntArray, Origin

RolloutBatch: TypeAlias = TensorDict
"""What `assemble` returns; its docstring lists the columns."""

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
)
IndexArray: TypeAlias = NDArray[np.int64]


def assemble(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> RolloutBatch:
    """Pads trajectories into one batch, in the order given.

    Args:
        trajectories: Any number, none included.
        pad_token_id: Fills what no token takes.
        prompt_width: P; None is the longest prompt.
        response_width: R; None is the longest response.

    Returns:
        int64: `prompts` [B, P] padded left, `responses` [B, R] padded right, `response_mask` [B, R] (1 = the model
        said it; a segment that several branches share has it in the first scored one only), `input_ids`,
        `attention_mask`, `position_ids` [B, W], `group`, `rollout`, `branch` (-1 where the loop returned a single
        output), `num_turns` [B]; where a trajectory has images with positions of their own, also
        `multi_modal_position_ids` [B, 3, W] in time, height and width.
        int32: `weight_versions` [B, R], -1 where the mask is 0. float32: `reward` [B], NaN where there is none,
        and `rollout_log_probs` [B, R], 0 where the mask is 0; the key is absent unless every sampled token has
        one. Rewards of turns, of tools and of the interaction: float32 `turn_rewards` [B, R], their sum at the last
        token of the turn that earned them and 0 elsewhere, and bool `has_turn_reward` [B, R], which tells a reward of
        0 from none; a branch has those of the turns it shares too. bool: `is_scored` [B]. Objects: `stop_reason`,
        `trajectory_id`, `feedback` where any trajectory has some (a tuple of `Feedback`), and one column for each name
        that any trajectory has in `reward_extra` or `extra_fields`, None where it lacks it. A name that is taken
        already gets the prefix `reward_extra.` or `extra_fields.`. `attachments`, where any trajectory has some: for
        each row a tuple of them, counted from its first token.

    Raises:
        DataError: A prompt or a response is longer than the width given.
    """
    flat = _flatten(trajectories)
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
    columns = _token_columns(
        flat, pad_token_id=pad_token_id, prompt_width=prompt_width, response_width=response_width
    )
    columns |= _turn_columns(trajectories, width=response_width)
    columns |= _row_columns(trajectories)
    if any(a.positions is not None for t in trajectories for a in t.output.attachments):
        columns["multi_modal_position_ids"] = _positions_in_3d(
            trajectories, first_B=prompt_width - flat.prompt_lengths_B, width=prompt_width + response_width
        )
    batch = TensorDict(
        {name: _as_tensor(array) for name, array in columns.items()}, batch_size=[len(trajectories)]
    )
    for name, values in _object_columns(trajectories).items():
        batch.set(name, NonTensorStack(*values))
    return batch


def timing_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Seconds per trajectory (and counts of preemption): least, most, mean, and the slowest row in full.

    The slowest is the one with most seconds of generation and tools together. No trajectories, no metrics.
    """
    if not trajectories:
        return {}
    columns = {
        name: [float(getattr(t.output.metrics, name)) for t in trajectories]
        for name in ("generate_sequences", "tool_calls", "num_preempted")
    }
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics[f"agent_loop/{name}/min"] = min(values)
        metrics[f"agent_loop/{name}/max"] = max(values)
        metrics[f"agent_loop/{name}/mean"] = sum(values) / len(values)
    busy_s = np.add(columns["generate_sequences"], columns["tool_calls"])
    slowest = int(np.argmax(busy_s))
    for name, values in columns.items():
        metrics[f"agent_loop/slowest/{name}"] = values[slowest]
    output = trajectories[slowest].output
    metrics["agent_loop/slowest/prompt_length"] = float(len(output.prompt_ids))
    metrics["agent_loop/slowest/response_length"] = float(len(output.response_ids))
    return metrics | _lag_metrics(trajectories)


def _lag_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How late the event loops were: at most, in the mean, and the share of time in which one was held up."""
    each = [t.output.metrics for t in trajectories]
    return {
        "timing/event_loop_lag_max_s": max(m.event_loop_lag_max for m in each),
        "timing/event_loop_lag_mean_s": sum(m.event_loop_lag_mean for m in each) / len(each),
        "timing/event_loop_late_share": sum(m.event_loop_late_share for m in each) / len(each),
    }


@dataclass(frozen=True, slots=True)
class _Flat:
    """All trajectories' tokens end to end, each prompt before its response; N tokens, M of them responses."""

    token_ids_N: IntArray
    is_model_M: NDArray[np.bool_]
    weight_versions_M: IntArray
    log_probs_M: FloatArray | None
    prompt_lengths_B: IndexArray
    response_lengths_B: IndexArray


def _flatten(trajectories: Sequence[Trajectory]) -> _Flat:
    prompts = [[s for s in t.output.segments if s.origin is Origin.PROMPT] for t in trajectories]
    responses = [[s for s in t.output.segments if s.origin is not Origin.PROMPT] for t in trajectories]
    in_order = list(chain.from_iterable(chain.from_iterable(zip(prompts, responses, strict=True))))
    of_responses = list(chain.from_iterable(responses))
    has_log_probs = all(s.log_probs is not None for s in of_responses if s.origin is Origin.MODEL)
    return _Flat(
        token_ids_N=_join([s.token_ids for s in in_order], np.int32),
        is_model_M=_repeat(_is_trained(trajectories), of_responses, np.bool_),
        weight_versions_M=_repeat(
            (-1 if s.weight_version is None else s.weight_version for s in of_responses),
            of_responses,
            np.int32,
        ),
        log_probs_M=_join([_log_probs(s) for s in of_responses], np.float32) if has_log_probs else None,
        prompt_lengths_B=_lengths(prompts),
        response_lengths_B=_lengths(responses),
    )


def _is_trained(trajectories: Sequence[Trajectory]) -> Iterator[bool]:
    """For each segment of each response whether it is the model's, and nobody before it is trained on it."""
    trained: set[int] = set()
    for trajectory in trajectories:
        for segment in trajectory.output.response_segments:
            yield segment.origin is Origin.MODEL and id(segment) not in trained
        if trajectory.branch is not None and trajectory.reward is not None:
            trained.update(map(id, trajectory.output.segments))


def _token_columns(
    flat: _Flat, *, pad_token_id: int, prompt_width: int, response_width: int
) -> dict[str, NDArray[Any]]:
    rows, width = len(flat.prompt_lengths_B), prompt_width + response_width
    first_B = prompt_width - flat.prompt_lengths_B
    lengths_B = flat.prompt_lengths_B + flat.response_lengths_B
    place_N = _places(first_B, lengths_B, width=width)
    place_M = _places(np.zeros_like(first_B), flat.response_lengths_B, width=response_width)

    def scatter(
        values: NDArray[Any], place: IndexArray, shape: tuple[int, int], dtype: Any, fill: int = 0
    ) -> Any:
        padded = np.full(shape[0] * shape[1], fill, dtype)
        padded[place] = values
        return padded.reshape(shape)

    whole, response = (rows, width), (rows, response_width)
    input_ids = scatter(flat.token_ids_N, place_N, whole, np.int64, pad_token_id)
    positions = np.arange(width)[None, :] - first_B[:, None]
    columns: dict[str, NDArray[Any]] = {
        "prompts": np.ascontiguousarray(input_ids[:, :prompt_width]),
        "responses": np.ascontiguousarray(input_ids[:, prompt_width:]),
        "response_mask": scatter(flat.is_model_M, place_M, response, np.int64),
        "input_ids": input_ids,
        "attention_mask": scatter(np.ones_like(flat.token_ids_N), place_N, whole, np.int64),
        "position_ids": np.clip(positions, 0, np.maximum(lengths_B - 1, 0)[:, None]),
        "weight_versions": scatter(flat.weight_versions_M, place_M, response, np.int32, -1),
    }
    if flat.log_probs_M is not None:
        columns["rollout_log_probs"] = scatter(flat.log_probs_M, place_M, response, np.float32)
    return columns


def _positions_in_3d(
    trajectories: Sequence[Trajectory], *, first_B: IndexArray, width: int
) -> NDArray[np.int64]:
    """Shape [B, 3, W]; 0 before the prompt, the last token's behind the response."""
    positions = np.zeros((len(trajectories), 3, width), np.int64)
    for row, (trajectory, first) in enumerate(zip(trajectories, first_B.tolist(), strict=True)):
        output = trajectory.output
        num_tokens = sum(map(len, output.segments))
        if num_tokens:
            own = position_ids(num_tokens, output.attachments)
            positions[row, :, first : first + num_tokens] = own
            positions[row, :, first + num_tokens :] = own[:, -1:]
    return positions


def _turn_columns(trajectories: Sequence[Trajectory], *, width: int) -> dict[str, NDArray[Any]]:
    rewards_BR = np.zeros((len(trajectories), width), np.float32)
    has_reward_BR = np.zeros(rewards_BR.shape, np.bool_)
    for row, trajectory in enumerate(trajectories):
        for feedback in trajectory.output.feedback:
            if feedback.reward is not None and feedback.place is not None:
                rewards_BR[row, feedback.place] += feedback.reward
                has_reward_BR[row, feedback.place] = True
    return {"turn_rewards": rewards_BR, "has_turn_reward": has_reward_BR}


def _row_columns(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    return {
        "reward": np.array([np.nan if t.reward is None else t.reward for t in trajectories], np.float32),
        "is_scored": np.array([t.reward is not None for t in trajectories], np.bool_),
        "group": np.array([t.group for t in trajectories], np.int64),
        "rollout": np.array([t.rollout for t in trajectories], np.int64),
        "branch": np.array([-1 if t.branch is None else t.branch for t in trajectories], np.int64),
        "num_turns": np.array([t.output.num_turns for t in trajectories], np.int64),
    }


def _object_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "stop_reason": [t.output.stop_reason.value for t in trajectories],
        "trajectory_id": [t.trajectory_id for t in trajectories],
    }
    if any(t.output.attachments for t in trajectories):
        columns["attachments"] = [t.output.attachments for t in trajectories]
    if any(t.output.feedback for t in trajectories):
        columns["feedback"] = [t.output.feedback for t in trajectories]
    sources: dict[str, list[Mapping[str, Any]]] = {
        "reward_extra": [t.reward_extra for t in trajectories],
        "extra_fields": [t.output.extra_fields for t in trajectories],
    }
    for source, mappings in sources.items():
        taken = {*TENSOR_COLUMNS, *columns}
        for name in dict.fromkeys(chain.from_iterable(mappings)):
            column = f"{source}.{name}" if name in taken else name
            columns[column] = [mapping.get(name) for mapping in mappings]
    return columns


def _places(first_B: IndexArray, lengths_B: IndexArray, *, width: int) -> IndexArray:
    """Where each token of a flat run goes in a row-major [B, width] array."""
    start_in_padded_B = np.arange(len(lengths_B)) * width + first_B
    start_in_flat_B = np.cumsum(lengths_B) - lengths_B
    return np.arange(int(lengths_B.sum())) + np.repeat(start_in_padded_B - start_in_flat_B, lengths_B)


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


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Shares the memory of a writable array."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _log_probs(segment: Segment) -> FloatArray:
    return np.zeros(len(segment), np.float32) if segment.log_probs is None else segment.log_probs


def _lengths(rows: Iterable[Iterable[Segment]]) -> IndexArray:
    return np.array([sum(map(len, segments)) for segments in rows], np.int64)


def _join(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _repeat(values: Iterable[Any], segments: Sequence[Segment], dtype: Any) -> NDArray[Any]:
    return np.repeat(np.fromiter(values, dtype), np.array([len(s) for s in segments], np.int64))
