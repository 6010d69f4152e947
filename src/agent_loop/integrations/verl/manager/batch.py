"""Batches for verl's trainer: padded tensors in a `DataProto`, and entries of its TransferQueue.

Shapes: B rows, P prompt width, R response width, W = P + R.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from agent_loop.integrations.verl.manager.settings import load_verl
from agent_loop.rollout.batch import as_tensor

FIXED_FIELDS = ("turn_scores", "tool_rewards", "min_global_steps", "max_global_steps", "extras")
"""Columns that a batch always has, so that batches of different loops can be concatenated."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths and padding of a batch."""

    prompt: int
    response: int
    pad_token_id: int


def padded_columns(outputs: Sequence[Any], widths: Widths) -> dict[str, torch.Tensor]:
    """Return the token columns of a batch, for outputs in verl's form.

    Returns:
        int64 `prompts` [B, P], padded left, `responses` and `response_mask` [B, R], padded right, `input_ids` and
        `attention_mask` [B, W]. float32 `rollout_log_probs` [B, R] if all outputs with sampled tokens have them.
    """
    num_rows, prompt_width, width = len(outputs), widths.prompt, widths.prompt + widths.response
    input_ids = np.full((num_rows, width), widths.pad_token_id, np.int64)
    attention = np.zeros((num_rows, width), np.int64)
    mask = np.zeros((num_rows, widths.response), np.int64)
    logprobs = np.zeros((num_rows, widths.response), np.float32)
    has_logprobs = True
    for row, output in enumerate(outputs):
        first, length = prompt_width - len(output.prompt_ids), len(output.response_ids)
        input_ids[row, first:prompt_width] = output.prompt_ids
        input_ids[row, prompt_width : prompt_width + length] = output.response_ids
        attention[row, first : prompt_width + length] = 1
        mask[row, :length] = output.response_mask
        if output.response_logprobs is not None:
            logprobs[row, :length] = output.response_logprobs
        elif mask[row].any():
            has_logprobs = False
    ids = as_tensor(input_ids)
    columns = {
        "prompts": ids[:, :prompt_width].contiguous(),
        "responses": ids[:, prompt_width:].contiguous(),
        "response_mask": as_tensor(mask),
        "input_ids": ids,
        "attention_mask": as_tensor(attention),
    }
    if has_logprobs and num_rows:
        columns["rollout_log_probs"] = as_tensor(logprobs)
    return columns


def score_columns(
    outputs: Sequence[Any], columns: Mapping[str, torch.Tensor], *, prompt_width: int
) -> dict[str, Any]:
    """Return float32 `rm_scores` [B, R]: the score at the last response token. Empty unless every row has a score."""
    scores = [output.reward_score for output in outputs]
    if any(score is None for score in scores):
        return {}
    last = columns["attention_mask"][:, prompt_width:].sum(dim=1) - 1
    rm_scores = torch.zeros_like(columns["response_mask"], dtype=torch.float32)
    rm_scores[torch.arange(len(scores)), last] = torch.tensor(scores, dtype=torch.float32)
    return {"rm_scores": rm_scores}


def routed_experts_column(outputs: Sequence[Any], widths: Widths) -> dict[str, torch.Tensor]:
    """Return int16 `routed_experts` [B, W, layers, experts]. Empty if the servers report none."""
    if outputs[0].routed_experts is None:
        return {}
    arrays = [torch.as_tensor(np.array(output.routed_experts)).to(torch.int16) for output in outputs]
    column = torch.zeros(
        len(outputs), widths.prompt + widths.response, *arrays[0].shape[1:], dtype=torch.int16
    )
    for row, (output, array) in enumerate(zip(outputs, arrays, strict=True)):
        first = widths.prompt - len(output.prompt_ids)
        room = column.shape[1] - first
        column[row, first : first + len(array)] = array[:room]
    return {"routed_experts": column}


def teacher_columns(outputs: Sequence[Any], widths: Widths) -> dict[str, torch.Tensor]:
    """Return `teacher_ids` and `teacher_logprobs` of a distillation, and take them out of the outputs' fields."""
    taken = [
        (o.extra_fields.pop("teacher_ids", None), o.extra_fields.pop("teacher_logprobs", None))
        for o in outputs
    ]
    if any(ids is None or logprobs is None for ids, logprobs in taken):
        return {}
    pad = load_verl("verl.experimental.teacher_loop.teacher_manager:_pad_teacher_outputs")
    padded = [
        pad(
            ids,
            logprobs,
            prompt_width=widths.prompt,
            response_width=widths.response,
            prompt_length=len(output.prompt_ids),
            response_length=len(output.response_ids),
            pad_token_id=widths.pad_token_id,
        )
        for output, (ids, logprobs) in zip(outputs, taken, strict=True)
    ]
    return {
        "teacher_ids": torch.cat([ids for ids, _ in padded]),
        "teacher_logprobs": torch.cat([logprobs for _, logprobs in padded]),
    }


def object_columns(outputs: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of `reward_extra_info` and of `extra_fields`, and `__num_turns__`."""
    columns: dict[str, Any] = {"__num_turns__": np.array([output.num_turns for output in outputs], np.int32)}
    infos = [output.extra_fields.get("reward_extra_info", {}) for output in outputs]
    for name in reward_extra_keys(outputs):
        columns[name] = _values([info.get(name) for info in infos])
    names = dict.fromkeys(name for output in outputs for name in output.extra_fields) | dict.fromkeys(
        FIXED_FIELDS
    )
    for name in names:
        columns[name] = objects([output.extra_fields.get(name) for output in outputs])
    return columns


def reward_extra_keys(outputs: Sequence[Any]) -> list[str]:
    """Return the names in `reward_extra_info` of any output."""
    infos = [output.extra_fields.get("reward_extra_info", {}) for output in outputs]
    return list(dict.fromkeys(name for info in infos for name in info))


def objects(values: Sequence[Any]) -> Any:
    """Return an array of objects, also of lists with the same length."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _values(values: Sequence[Any]) -> Any:
    """Return an array of a reward's values. Numbers that a failed row lacks are 0."""
    is_numeric = all(isinstance(value, (int, float, np.number)) for value in values if value is not None)
    return np.array([0 if value is None and is_numeric else value for value in values])


def timing_metrics(metrics: Sequence[Mapping[str, float]], batch: Any) -> dict[str, Any]:
    """Return `timing` of a batch's meta info, as verl computes it."""
    values = {
        name: np.array([each[name] for each in metrics])
        for name in ("num_preempted", "generate_sequences", "tool_calls", "compute_score")
    }
    reductions: Mapping[str, Callable[[Any], Any]] = {"min": np.min, "max": np.max, "mean": np.mean}
    timing = {
        f"agent_loop/{name}/{kind}": reduce(column)
        for name, column in values.items()
        for kind, reduce in reductions.items()
    }
    slowest = int(np.argmax(values["generate_sequences"] + values["tool_calls"] + values["compute_score"]))
    for name, column in values.items():
        timing[f"agent_loop/slowest/{name}"] = column[slowest]
    prompt_width = batch["prompts"].shape[1]
    attention = batch["attention_mask"][slowest]
    timing["agent_loop/slowest/prompt_length"] = attention[:prompt_width].sum().item()
    timing["agent_loop/slowest/response_length"] = attention[prompt_width:].sum().item()
    return timing


def joined(parts: Sequence[Any]) -> Any:
    """Return one `DataProto` of the workers' batches, with `timing` in its meta info.

    A column that some of them lack is None in their rows.
    """
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    metas = [part.meta_info for part in parts]
    for part in parts:
        part.meta_info = {}
        for name in names:
            if name not in part.non_tensor_batch:
                part.non_tensor_batch[name] = objects([None] * len(part))
    whole = load_verl("verl.protocol:DataProto").concat(list(parts))
    timing = timing_metrics([metrics for meta in metas for metrics in meta["metrics"]], whole.batch)
    meta_info: dict[str, Any] = {"timing": timing}
    if all("reward_extra_keys" in meta for meta in metas):
        keys = dict.fromkeys(key for meta in metas for key in meta["reward_extra_keys"])
        meta_info["reward_extra_keys"] = list(keys)
    whole.meta_info = meta_info
    return whole


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """Entry of the queue: a trajectory, or the status of a prompt."""

    key: str
    tag: Mapping[str, Any]
    fields: Mapping[str, Any] | None = None
    """Columns of a trajectory. None changes the tag alone."""


class QueueWriter:
    """Writer of one partition. Entries that arrive while a message is sent share the next message."""

    def __init__(self, partition: str) -> None:
        self._partition = partition
        self._waiting: list[QueueEntry] = []
        self._lock = asyncio.Lock()
        self._queue: Any = import_module("transfer_queue")

    async def put(self, entries: Sequence[QueueEntry]) -> None:
        """Write entries, and return when they are in the queue."""
        self._waiting += entries
        async with self._lock:
            batch, self._waiting = self._waiting, []
            if batch:
                await self._send(batch)

    async def _send(self, batch: Sequence[QueueEntry]) -> None:
        """Send trajectories in one message for each set of columns, then statuses in one message."""
        by_columns: dict[tuple[str, ...], list[QueueEntry]] = defaultdict(list)
        for entry in batch:
            by_columns[() if entry.fields is None else tuple(sorted(entry.fields))].append(entry)
        for columns in sorted(by_columns, reverse=True):
            entries = by_columns[columns]
            fields: Any = None
            if columns:
                to_tensordict = load_verl("verl.utils.tensordict_utils:list_of_dict_to_tensordict")
                fields = to_tensordict([dict(entry.fields or {}) for entry in entries])
            await self._queue.async_kv_batch_put(
                keys=[entry.key for entry in entries],
                partition_id=self._partition,
                fields=fields,
                tags=[dict(entry.tag) for entry in entries],
            )


def trajectory_entry(
    output: Any,
    *,
    key: str,
    row: Mapping[str, Any],
    position_ids: torch.Tensor,
    multi_modal_inputs: Mapping[str, Any],
) -> QueueEntry:
    """Return the entry of a trajectory, with unpadded tensors.

    Args:
        output: The output in verl's form, scored.
        key: Key of the entry.
        row: The columns of the row, with its `session_id` and `global_steps`.
        position_ids: Shape [num_tokens], or [4, num_tokens].
        multi_modal_inputs: Inputs of the model besides the tokens.
    """
    fields: dict[str, Any] = {
        "prompts": torch.tensor(output.prompt_ids, dtype=torch.int64),
        "responses": torch.tensor(output.response_ids, dtype=torch.int64),
        "response_mask": torch.tensor(output.response_mask, dtype=torch.int64),
        "num_turns": output.num_turns,
        "metrics": output.metrics.model_dump(),
        "extra_fields": dict(output.extra_fields),
        "position_ids": position_ids,
        "multi_modal_inputs": multi_modal_inputs,
        **row,
    }
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
    fields["loss_mask"] = fields["response_mask"]
    if output.response_logprobs is not None:
        fields["rollout_log_probs"] = torch.tensor(output.response_logprobs, dtype=torch.float32)
    if output.reward_score is not None:
        fields["rm_scores"] = torch.zeros_like(fields["response_mask"], dtype=torch.float32)
        fields["rm_scores"][-1] = output.reward_score
    if output.routed_experts is not None:
        fields["routed_experts"] = _aligned(output.routed_experts, num_tokens=len(fields["input_ids"]))
    for name in ("teacher_ids", "teacher_logprobs"):
        if name in fields["extra_fields"]:
            fields[name] = fields["extra_fields"].pop(name)
    num_prompt, num_response = len(fields["prompts"]), len(fields["responses"])
    tag = {
        "status": "success",
        "prompt_len": num_prompt,
        "response_len": num_response,
        "seq_len": num_prompt + num_response,
        "global_steps": row["global_steps"],
        "min_global_steps": output.extra_fields.get("min_global_steps"),
        "max_global_steps": output.extra_fields.get("max_global_steps"),
    }
    return QueueEntry(key, tag, fields)


def _aligned(routed_experts: Any, *, num_tokens: int) -> torch.Tensor:
    """Return the experts of each token. Tokens that the server did not report have zeros."""
    given = torch.tensor(routed_experts, dtype=torch.int16)[:num_tokens]
    aligned = given.new_zeros((num_tokens, *given.shape[1:]))
    aligned[: len(given)] = given
    return aligned
