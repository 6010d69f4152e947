"""Arrangement of the rows of a micro-batch: end to end in lines, which saves padding, or as a prefix tree.

A line holds rows end to end. The positions of each row start at 0, from which `transformers` builds a mask that
separates the rows. K lines of L tokens, M sampled tokens; B, P, R as in `micro_batches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.prefix_tree.layout import TreeLayout, lay_out
from agent_loop.training.prefix_tree.tree import LongArray


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed input of a model, and the positions of its outputs."""

    input_ids_KL: Tensor
    position_ids_KL: Tensor
    """0 at padding, so that each pad is a row of its own."""
    before_M: Tensor
    """Position in the flattened lines of the token before each sampled token, row by row."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Arguments of a model."""
        return {"input_ids": self.input_ids_KL, "position_ids": self.position_ids_KL}


def pack(micro_batch: MicroBatch) -> PackedRows:
    """Pack the rows of a micro-batch into its `lines`."""
    rows = _tokens(micro_batch)
    width = max(sum(len(rows[row]) for row in line) for line in micro_batch.lines)
    input_ids_KL = np.zeros((len(micro_batch.lines), width), dtype=np.int64)
    position_ids_KL = np.zeros_like(input_ids_KL)
    places: list[LongArray] = [np.empty(0, dtype=np.int64)] * len(rows)
    for number, line in enumerate(micro_batch.lines):
        start = 0
        for row in line:
            end = start + len(rows[row])
            input_ids_KL[number, start:end] = rows[row]
            position_ids_KL[number, start:end] = np.arange(len(rows[row]))
            places[row] = number * width + np.arange(start, end)
            start = end
    device, as_tensor = micro_batch.input_ids_BW.device, cast(Any, torch).from_numpy
    return PackedRows(
        input_ids_KL=as_tensor(input_ids_KL).to(device),
        position_ids_KL=as_tensor(position_ids_KL).to(device),
        before_M=_before(places, micro_batch),
    )


def as_tree(micro_batch: MicroBatch) -> tuple[TreeLayout, Tensor]:
    """Return the prefix tree of the rows of a micro-batch, and the position before each sampled token, [M]."""
    layout = lay_out(_tokens(micro_batch), device=micro_batch.input_ids_BW.device)
    return layout, _before(layout.places, micro_batch)


def _tokens(micro_batch: MicroBatch) -> list[LongArray]:
    """Return the token ids of each row, without padding."""
    is_token_BW = micro_batch.attention_mask_BW.bool().cpu().numpy()
    ids_BW = micro_batch.input_ids_BW.cpu().numpy()
    return [ids_W[is_token_W] for ids_W, is_token_W in zip(ids_BW, is_token_BW, strict=True)]


def _before(places: Sequence[LongArray], micro_batch: MicroBatch) -> Tensor:
    """Return the position before each sampled token, row by row, from the positions of the tokens of each row."""
    mask_BR = micro_batch.mask_BR.bool().cpu().numpy()
    lengths_B: list[int] = cast(Any, micro_batch.is_response_BR.sum(dim=1)).tolist()
    before: list[LongArray] = []
    for places_of_row, mask_R, length in zip(places, mask_BR, lengths_B, strict=True):
        first = len(places_of_row) - length - 1
        before.append(places_of_row[first:-1][mask_R[:length]])
    return cast(Any, torch).from_numpy(np.concatenate(before)).to(micro_batch.input_ids_BW.device)
