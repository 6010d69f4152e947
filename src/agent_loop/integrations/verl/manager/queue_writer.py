"""Writer of trajectories into verl's TransferQueue."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from agent_loop.integrations.verl.manager.verl_package import load_verl


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """Entry of the queue: a trajectory, or the status of a prompt."""

    key: str
    tag: Mapping[str, Any]
    fields: Mapping[str, Any] | None = None
    """Columns of a trajectory. None changes the tag alone."""


class QueueWriter:
    """Writer of one partition. Entries that arrive while a message is sent share the next message.

    Args:
        partition: `train` or `val`.
    """

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
