"""Division of a batch into micro-batches that fit into memory.

B rows, P prompt width, R response width, W = P + R. In a micro-batch, these are the sizes of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.prefix_tree.tree import PASS_COST, LongArray, SortedRows
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup
from agent_loop.trajectory.attachments import Attachment

Layout: TypeAlias = Literal["tree", "padded", "alone"]
"""How the rows of a micro-batch are computed: as a prefix tree, padded to a common width, or one at a time."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of a batch, without the columns that are padding in all of them."""

    rows_B: Tensor
    """Indices of the rows in the batch."""
    input_ids_BW: Tensor
    attention_mask_BW: Tensor
    position_ids: Tensor
    """Shape [B, W], or [3, B, W] for time, height and width."""
    mask_BR: Tensor
    """1 for sampled tokens."""
    attachments: tuple[tuple[Attachment, ...], ...] = ()
    """Attachments of each row, with positions counted from the first column, padding included. Empty if no row has
    any."""
    is_tree: bool = False
    """The rows are computed as a prefix tree, in which each distinct token is computed once."""
    is_spare: bool = False
    """The rows are also in another micro-batch, so that these count nowhere."""

    @property
    def is_one_plain_row(self) -> bool:
        """Whether this is a single row of text, without padding, whose positions count from 0."""
        return len(self.input_ids_BW) == 1 and self.position_ids.dim() == 2 and not any(self.attachments)

    @property
    def response_ids_BR(self) -> Tensor:
        return self.input_ids_BW[:, self._prompt_width :]

    @property
    def is_response_BR(self) -> Tensor:
        """Bool: tokens of the response, sampled or not; False at padding."""
        return self.attention_mask_BW[:, self._prompt_width :].bool()

    @property
    def _prompt_width(self) -> int:
        return self.input_ids_BW.shape[1] - self.mask_BR.shape[1]

    def cut(self, values: Tensor) -> Tensor:
        """Return these rows and response columns of a [rows, width] tensor of the whole batch."""
        return values[self.rows_B.to(values.device), : self.mask_BR.shape[1]].to(self.mask_BR.device)

    def put(self, values_BR: Tensor, *, into: Tensor) -> None:
        """Write values to a tensor of the whole batch, with 0 at padding. A spare micro-batch writes nothing."""
        if self.is_spare:
            return
        values_BR = torch.where(self.is_response_BR, values_BR, 0).to(into)
        into[self.rows_B.to(into.device), : self.mask_BR.shape[1]] = values_BR


def trainable_rows(batch: RolloutBatch, keep_B: Tensor | None = None) -> Tensor:
    """Return the indices of the rows that are kept and have a sampled token."""
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
    batch: RolloutBatch,
    *,
    rows: Tensor,
    max_tokens: int,
    device: torch.device,
    layout: Layout = "padded",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[MicroBatch]:
    """Yield the rows in micro-batches of at most `max_tokens` tokens, or of one row that is longer.

    In a prefix tree, rows are in the order of their tokens, and a token of several rows of a micro-batch counts once.
    Otherwise the longest rows come first, and padding counts as tokens: at most `PASS_COST` in a micro-batch.

    In a process group, these are the micro-batches of this rank's share of the rows. All shares have about the same
    number of tokens to compute. All ranks run the same number of micro-batches: a rank with fewer runs spare ones at
    the end.

    Rows of a batch with images are padded instead of computed as a tree.
    """
    prompt_width = batch["prompts"].shape[1]
    attention_mask = batch["attention_mask"]
    prompt_lengths = attention_mask[:, :prompt_width].sum(dim=1)
    response_lengths = attention_mask[:, prompt_width:].sum(dim=1)
    if layout == "tree" and "attachments" in batch:
        layout = "padded"
    rows = rows[(prompt_lengths + response_lengths)[rows].argsort(descending=True, stable=True)]

    def cut(rows: Tensor) -> Iterator[MicroBatch]:
        match layout:
            case "tree":
                parts = [torch.tensor(run) for run in sorted_rows(batch, rows).divided(max_tokens=max_tokens)]
            case "padded":
                parts = _padded_parts(rows, prompt_lengths, response_lengths, max_tokens=max_tokens)
            case "alone":
                parts = [rows[n : n + 1] for n in range(len(rows))]
        for part in parts:
            start = prompt_width - int(prompt_lengths[part].max())
            response_width = int(response_lengths[part].max())
            columns = slice(start, prompt_width + response_width)
            first_columns = prompt_width - start - prompt_lengths[part]
            yield MicroBatch(
                rows_B=part,
                input_ids_BW=batch["input_ids"][part, columns].to(device),
                attention_mask_BW=attention_mask[part, columns].to(device),
                position_ids=_positions(batch, part, columns).to(device),
                mask_BR=batch["response_mask"][part, :response_width].to(device),
                attachments=_attachments(batch, part, first_columns=first_columns),
                is_tree=layout == "tree",
            )

    if not len(rows):
        return
    if process_group.size == 1:
        yield from cut(rows)
        return
    rank, size = process_group.rank, process_group.size
    own_rows = rows[rank::size]
    if layout == "tree":
        shares = sorted_rows(batch, rows).shares(size)
        own_rows = torch.tensor(shares[rank] if rank < len(shares) else (), dtype=torch.long)
    own = list(cut(own_rows)) if len(own_rows) else []
    num_spare = max(process_group.all_gather(len(own))) - len(own)
    yield from own
    first = own[-1] if own else next(cut(rows[-1:]))
    spare = replace(first, mask_BR=torch.zeros_like(first.mask_BR), is_spare=True)
    for _ in range(num_spare):
        yield spare


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
    longest_first: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, *, max_tokens: int
) -> Iterator[Tensor]:
    part: list[int] = []
    prompt_width = response_width = num_tokens = 0
    for row in cast(list[int], cast(Any, longest_first).tolist()):
        prompt_length, response_length = int(prompt_lengths[row]), int(response_lengths[row])
        wider_prompt, wider_response = max(prompt_width, prompt_length), max(response_width, response_length)
        num_tokens += prompt_length + response_length
        num_places = (len(part) + 1) * (wider_prompt + wider_response)
        if part and (num_places > max_tokens or num_places - num_tokens > PASS_COST):
            yield torch.tensor(part)
            part, num_tokens = [], prompt_length + response_length
            wider_prompt, wider_response = prompt_length, response_length
        part.append(row)
        prompt_width, response_width = wider_prompt, wider_response
    if part:
        yield torch.tensor(part)


def sorted_rows(batch: RolloutBatch, rows: Tensor) -> SortedRows:
    """Return rows of a batch, sorted by their tokens."""
    input_ids_BW, attention_mask_BW = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
    indices: list[int] = cast(Any, rows).tolist()
    tokens: dict[int, LongArray] = {row: input_ids_BW[row, attention_mask_BW[row] == 1] for row in indices}
    return SortedRows(tokens)
