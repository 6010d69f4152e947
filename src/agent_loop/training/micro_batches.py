"""Cuts a batch into parts that fit into memory, with little padding.

B rows, P prompt width, R response width, W = P + R; in a micro-batch all of them are those of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.attachments import Attachment
from agent_loop.rollout.batch import RolloutBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch, without the columns that are padding in all of them."""

    rows_B: Tensor
    """Which rows of the batch these are."""
    input_ids_BW: Tensor
    attention_mask_BW: Tensor
    position_ids: Tensor
    """Shape [B, W]; [3, B, W] in time, height and width."""
    mask_BR: Tensor
    """1 = the model said it."""
    attachments: tuple[tuple[Attachment, ...], ...] = ()
    """For each row, counted from its first column, padding included; empty where no row has any."""

    @property
    def response_ids_BR(self) -> Tensor:
        return self.input_ids_BW[:, self.input_ids_BW.shape[1] - self.mask_BR.shape[1] :]

    def cut(self, values: Tensor) -> Tensor:
        """These rows and response columns of a [rows, width] column of the whole batch."""
        return values[self.rows_B.to(values.device), : self.mask_BR.shape[1]].to(self.mask_BR.device)


def micro_batches(
    batch: RolloutBatch, *, rows: Tensor, max_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """The rows, longest first, in parts of at most `max_tokens` padded tokens (or of one row that is longer)."""
    prompt_width = batch["prompts"].shape[1]
    attention_mask = batch["attention_mask"]
    prompt_lengths = attention_mask[:, :prompt_width].sum(dim=1)
    response_lengths = attention_mask[:, prompt_width:].sum(dim=1)
    for part in _parts(rows, prompt_lengths, response_lengths, max_tokens=max_tokens):
        start = prompt_width - int(prompt_lengths[part].max())
        response_width = int(response_lengths[part].max())
        columns = slice(start, prompt_width + response_width)
        yield MicroBatch(
            rows_B=part,
            input_ids_BW=batch["input_ids"][part, columns].to(device),
            attention_mask_BW=attention_mask[part, columns].to(device),
            position_ids=_positions(batch, part, columns).to(device),
            mask_BR=batch["response_mask"][part, :response_width].to(device),
            attachments=_attachments(batch, part, first_columns=prompt_width - start - prompt_lengths[part]),
        )


def _positions(batch: RolloutBatch, part: Tensor, columns: slice) -> Tensor:
    if "multi_modal_position_ids" not in batch:
        return batch["position_ids"][part, columns]
    return batch["multi_modal_position_ids"][part, :, columns].transpose(0, 1)


def _attachments(
    batch: RolloutBatch, part: Tensor, *, first_columns: Tensor
) -> tuple[tuple[Attachment, ...], ...]:
    if "attachments" not in batch:
        return ()
    of_rows = cast(list[tuple[Attachment, ...]], batch["attachments"])
    rows: list[int] = cast(Any, part).tolist()
    columns: list[int] = cast(Any, first_columns).tolist()
    return tuple(
        tuple(a.moved(column) for a in of_rows[row]) for row, column in zip(rows, columns, strict=True)
    )


def _parts(
    rows: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, *, max_tokens: int
) -> Iterator[Tensor]:
    lengths = (prompt_lengths + response_lengths)[rows]
    part: list[int] = []
    prompt_width = response_width = 0
    longest_first: list[int] = cast(Any, rows[lengths.argsort(descending=True, stable=True)]).tolist()
    for row in longest_first:
        wider_prompt = max(prompt_width, int(prompt_lengths[row]))
        wider_response = max(response_width, int(response_lengths[row]))
        if part and (len(part) + 1) * (wider_prompt + wider_response) > max_tokens:
            yield torch.tensor(part)
            part = []
            wider_prompt, wider_response = int(prompt_lengths[row]), int(response_lengths[row])
        part.append(row)
        prompt_width, response_width = wider_prompt, wider_response
    if part:
        yield torch.tensor(part)
