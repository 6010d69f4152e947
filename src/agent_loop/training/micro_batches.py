"""Cuts a batch into parts that fit into memory, with little padding.

B rows, P prompt width, R response width, W = P + R; in a micro-batch all of them are those of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from agent_loop.attachments import Attachment
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch

Lines: TypeAlias = tuple[tuple[int, ...], ...]


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
    lines: Lines = ()
    """Which of these rows go end to end into one line of the input; empty where each is padded on its own."""

    @property
    def response_ids_BR(self) -> Tensor:
        return self.input_ids_BW[:, self._prompt_width :]

    @property
    def is_response_BR(self) -> Tensor:
        """Bool: there is a token, be it the model's or not."""
        return self.attention_mask_BW[:, self._prompt_width :].bool()

    @property
    def _prompt_width(self) -> int:
        return self.input_ids_BW.shape[1] - self.mask_BR.shape[1]

    def cut(self, values: Tensor) -> Tensor:
        """These rows and response columns of a [rows, width] column of the whole batch."""
        return values[self.rows_B.to(values.device), : self.mask_BR.shape[1]].to(self.mask_BR.device)

    def put(self, values_BR: Tensor, *, into: Tensor) -> None:
        """The other way round, for tokens there are; what is padding becomes 0."""
        values_BR = torch.where(self.is_response_BR, values_BR, 0).to(into)
        into[self.rows_B.to(into.device), : self.mask_BR.shape[1]] = values_BR


def trainable_rows(batch: RolloutBatch, keep_B: Tensor | None = None) -> Tensor:
    """The numbers of the rows that are kept and have a token of the model's.

    Raises:
        DataError: One of them has no prompt.
    """
    is_trainable_B = batch["response_mask"].any(dim=1)
    rows = (is_trainable_B if keep_B is None else is_trainable_B & keep_B).nonzero().flatten()
    prompt_lengths = batch["attention_mask"][rows, : batch["prompts"].shape[1]].sum(dim=1)
    if not prompt_lengths.all():
        row = int(rows[int(prompt_lengths.argmin())])
        raise DataError(
            f"{batch['trajectory_id'][row]} has an empty prompt, so nothing predicts its first token; give it at "
            "least one token"
        )
    return rows


def micro_batches(
    batch: RolloutBatch, *, rows: Tensor, max_tokens: int, device: torch.device, use_packing: bool = False
) -> Iterator[MicroBatch]:
    """The rows, longest first, in parts of at most `max_tokens` tokens (or of one row that is longer).

    With packing, short rows share lines as long as the longest row; rows of a batch with images are padded anyway.
    Padding counts as tokens.
    """
    prompt_width = batch["prompts"].shape[1]
    attention_mask = batch["attention_mask"]
    prompt_lengths = attention_mask[:, :prompt_width].sum(dim=1)
    response_lengths = attention_mask[:, prompt_width:].sum(dim=1)
    lengths = (prompt_lengths + response_lengths)[rows]
    longest_first: list[int] = cast(Any, rows[lengths.argsort(descending=True, stable=True)]).tolist()
    if use_packing and "attachments" not in batch:
        parts = _packed_parts(longest_first, prompt_lengths + response_lengths, max_tokens=max_tokens)
    else:
        parts = _padded_parts(longest_first, prompt_lengths, response_lengths, max_tokens=max_tokens)
    for part, lines in parts:
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
            lines=lines,
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


def _padded_parts(
    longest_first: Sequence[int], prompt_lengths: Tensor, response_lengths: Tensor, *, max_tokens: int
) -> Iterator[tuple[Tensor, Lines]]:
    part: list[int] = []
    prompt_width = response_width = 0
    for row in longest_first:
        wider_prompt = max(prompt_width, int(prompt_lengths[row]))
        wider_response = max(response_width, int(response_lengths[row]))
        if part and (len(part) + 1) * (wider_prompt + wider_response) > max_tokens:
            yield torch.tensor(part), ()
            part = []
            wider_prompt, wider_response = int(prompt_lengths[row]), int(response_lengths[row])
        part.append(row)
        prompt_width, response_width = wider_prompt, wider_response
    if part:
        yield torch.tensor(part), ()


def _packed_parts(
    longest_first: Sequence[int], lengths: Tensor, *, max_tokens: int
) -> Iterator[tuple[Tensor, Lines]]:
    """Each row goes into the first line with room for it; lines are as long as the first row."""
    part: list[int] = []
    lines: list[list[int]] = []
    room: list[int] = []
    width = 0
    for row in longest_first:
        length = int(lengths[row])
        line = next((line for line, free in enumerate(room) if free >= length), len(lines))
        if line == len(lines):
            if lines and (len(lines) + 1) * width > max_tokens:
                yield torch.tensor(part), tuple(map(tuple, lines))
                part, lines, room, line = [], [], [], 0
            width = width if lines else length
            lines.append([])
            room.append(width)
        lines[line].append(len(part))
        room[line] -= length
        part.append(row)
    if part:
        yield torch.tensor(part), tuple(map(tuple, lines))
