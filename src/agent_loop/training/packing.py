"""Packing of several rows into one line of the input, which saves padding.

A line holds rows end to end. The positions of each row start at 0, from which `transformers` builds a mask that
separates the rows. With shared prefixes, each row adds only the tokens after its common prefix with the row before it,
and a mask selects the tokens that each token attends to. K lines of L tokens, M sampled tokens; B, P, R as in
`micro_batches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.training.micro_batches import NO_TOKENS, LongArray, MicroBatch, common_prefix


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed input of a model, and the positions of its outputs."""

    input_ids_KL: Tensor
    position_ids_KL: Tensor
    """0 at padding, so that each pad is a row of its own."""
    before_M: Tensor
    """Position in the flattened lines of the token before each sampled token, row by row."""
    is_seen_KLL: Tensor | None
    """Bool: tokens of its line that each token attends to; None derives the mask from the positions."""

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the arguments of a model that computes in this dtype."""
        inputs = {"input_ids": self.input_ids_KL, "position_ids": self.position_ids_KL}
        if self.is_seen_KLL is None:
            return inputs
        return inputs | {"attention_mask": additive_mask(self.is_seen_KLL, dtype=dtype)}


def pack(micro_batch: MicroBatch) -> PackedRows:
    """Pack the rows of a micro-batch into its `lines`."""
    device = micro_batch.input_ids_BW.device
    is_token_BW = micro_batch.attention_mask_BW.bool().cpu().numpy()
    ids_BW, mask_BR = micro_batch.input_ids_BW.cpu().numpy(), micro_batch.mask_BR.bool().cpu().numpy()
    lines = [
        _Line([ids_BW[row, is_token_BW[row]] for row in line], shares_prefixes=micro_batch.shares_prefixes)
        for line in micro_batch.lines
    ]
    width = max(line.num_tokens for line in lines)
    input_ids_KL = np.zeros((len(lines), width), dtype=np.int64)
    position_ids_KL = np.zeros_like(input_ids_KL)
    is_seen_KLL = (
        np.zeros((len(lines), width, width), dtype=np.bool_) if micro_batch.shares_prefixes else None
    )
    before: list[LongArray] = [np.empty(0, dtype=np.int64)] * len(is_token_BW)
    response_lengths = is_token_BW[:, -mask_BR.shape[1] :].sum(axis=1)
    for number, (line, rows) in enumerate(zip(lines, micro_batch.lines, strict=True)):
        line.write(
            input_ids_KL[number],
            position_ids_KL[number],
            None if is_seen_KLL is None else is_seen_KLL[number],
        )
        for row, places in zip(rows, line.places, strict=True):
            is_model = mask_BR[row, : response_lengths[row]]
            before[row] = number * width + places[len(places) - len(is_model) - 1 : -1][is_model]
    as_tensor: Any = cast(Any, torch).from_numpy
    return PackedRows(
        input_ids_KL=as_tensor(input_ids_KL).to(device),
        position_ids_KL=as_tensor(position_ids_KL).to(device),
        before_M=as_tensor(np.concatenate(before)).to(device),
        is_seen_KLL=None if is_seen_KLL is None else as_tensor(is_seen_KLL).to(device),
    )


class _Line:
    """Positions of the tokens of several rows in one line."""

    def __init__(self, rows: list[LongArray], *, shares_prefixes: bool) -> None:
        self._rows = rows
        self._shared: list[int] = []
        self.places: list[LongArray] = []
        """For each row, the positions of its tokens."""
        self.num_tokens = 0
        last, last_places = NO_TOKENS, np.empty(0, dtype=np.int64)
        for row in rows:
            num_shared = common_prefix(last, row) if shares_prefixes else 0
            end = self.num_tokens + len(row) - num_shared
            last, last_places = (
                row,
                np.concatenate([last_places[:num_shared], np.arange(self.num_tokens, end)]),
            )
            self.places.append(last_places)
            self._shared.append(num_shared)
            self.num_tokens = end

    def write(
        self,
        input_ids_L: LongArray,
        position_ids_L: LongArray,
        is_seen_LL: NDArray[np.bool_] | None,
    ) -> None:
        """Write the line to arrays of zeros that are at least as long as the line."""
        for row, places, num_shared in zip(self._rows, self.places, self._shared, strict=True):
            input_ids_L[places] = row
            position_ids_L[places] = np.arange(len(row))
            if is_seen_LL is not None:
                added = places[num_shared:]
                is_seen_LL[np.ix_(added, places)] = np.tri(len(added), len(row), num_shared, dtype=np.bool_)
        if is_seen_LL is not None:
            np.fill_diagonal(is_seen_LL, True)


def additive_mask(is_seen_KLL: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the mask that attention of `transformers` adds to its scores, [K, 1, L, L]."""
    mask_KLL = torch.zeros(is_seen_KLL.shape, dtype=dtype, device=is_seen_KLL.device)
    return mask_KLL.masked_fill_(~is_seen_KLL, torch.finfo(dtype).min).unsqueeze(1)
