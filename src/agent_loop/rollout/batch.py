"""Batches of padded tensors. Each column is one flat concatenation, copied row by row.

Shapes: B rows, P prompt width, R response width, W = P + R.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

from agent_loop.errors import DataError
from agent_loop.rollout.columns import as_tensor, extra_column, row_columns, set_objects
from agent_loop.rollout.flat_tokens import FlatTokens, IndexArray, runs
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
    columns = _token_columns(
        flat, pad_token_id=pad_token_id, prompt_width=prompt_width, response_width=response_width
    )
    columns |= _turn_columns(trajectories, width=response_width)
    columns |= row_columns(trajectories)
    for name in flat.extra_names:
        columns[extra_column(name, taken=TENSOR_COLUMNS)] = _padded_extra(flat, name, width=response_width)
    if any(a.positions is not None for t in trajectories for a in t.output.attachments):
        columns["multi_modal_position_ids"] = _positions_in_3d(
            trajectories, first_B=prompt_width - flat.prompt_lengths_B, width=prompt_width + response_width
        )
    batch = TensorDict(
        {name: as_tensor(array) for name, array in columns.items()}, batch_size=[len(trajectories)]
    )
    set_objects(batch, trajectories, taken={*TENSOR_COLUMNS, *columns})
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


def _token_columns(
    flat: FlatTokens, *, pad_token_id: int, prompt_width: int, response_width: int
) -> dict[str, NDArray[Any]]:
    rows, width = len(flat.prompt_lengths_B), prompt_width + response_width
    first_B, lengths_B = prompt_width - flat.prompt_lengths_B, flat.lengths_B
    whole, response = (rows, width), (rows, response_width)
    longest = int(lengths_B.max(initial=0))
    ones, counted = np.ones(longest, np.int64), np.arange(longest)

    def of_responses(values_M: NDArray[Any], dtype: Any, fill: int = 0) -> NDArray[Any]:
        values = runs(values_M, flat.response_lengths_B)
        return _padded(values, first_B=np.zeros_like(first_B), shape=response, dtype=dtype, fill=fill)

    token_runs = runs(flat.token_ids_N, lengths_B)
    input_ids = _padded(token_runs, first_B=first_B, shape=whole, dtype=np.int64, fill=pad_token_id)

    def of_tokens(values: NDArray[Any]) -> NDArray[Any]:
        """Return a column with the first values in the positions of each row's tokens."""
        of_rows = (values[:length] for length in lengths_B.tolist())
        return _padded(of_rows, first_B=first_B, shape=whole, dtype=np.int64)

    columns: dict[str, NDArray[Any]] = {
        "prompts": input_ids[:, :prompt_width],
        "responses": input_ids[:, prompt_width:],
        "response_mask": of_responses(flat.is_model_M, np.int64),
        "input_ids": input_ids,
        "attention_mask": of_tokens(ones),
        "position_ids": of_tokens(counted),
        "weight_versions": of_responses(flat.weight_versions_M, np.int32, -1),
    }
    logprobs_M = flat.logprobs_M
    if logprobs_M is not None:
        columns["rollout_log_probs"] = of_responses(logprobs_M, np.float32)
    return columns


def _padded_extra(flat: FlatTokens, name: str, *, width: int) -> NDArray[Any]:
    """Return one of the extras, shape [B, R, ...]."""
    values_M = flat.extra_M(name)
    lengths_B = flat.response_lengths_B
    return _padded(
        runs(values_M, lengths_B),
        first_B=np.zeros_like(lengths_B),
        shape=(len(lengths_B), width, *values_M.shape[1:]),
        dtype=values_M.dtype,
    )


def _padded(
    values: Iterable[NDArray[Any]], *, first_B: IndexArray, shape: tuple[int, ...], dtype: Any, fill: int = 0
) -> NDArray[Any]:
    """Return a column of `fill` with one run of values in each row. `first_B` is the position of each run."""
    padded = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)
    for row, first, run in zip(padded, first_B.tolist(), values, strict=True):
        row[first : first + len(run)] = run
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
