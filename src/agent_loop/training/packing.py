"""Several rows in one line of the input, so that little of it is padding.

A line holds rows end to end, with positions that begin at 0 for each: from those, `transformers` builds a mask that
keeps the rows apart. Where rows share prefixes, each adds to its line only what the row before it does not begin with,
and a mask says which tokens each one follows. K lines of L tokens, M tokens of the model's; B, P, R as in
`micro_batches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import OptimConfig
from agent_loop.errors import ConfigError
from agent_loop.training.micro_batches import NO_TOKENS, LongArray, MicroBatch, common_prefix

TOLERANCE = 0.02
"""Of the largest activation: half-precision attention differs by so much where its shapes do."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What the model gets, and where it answers."""

    input_ids_KL: Tensor
    position_ids_KL: Tensor
    """0 at padding, so that each pad is a row of its own."""
    before_M: Tensor
    """For each token of the model's, row by row, the place in the flattened lines of the token before it."""
    is_seen_KLL: Tensor | None
    """Which tokens of its line each token attends to; None leaves that to the positions."""

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Arguments of a model that computes in this type."""
        inputs = {"input_ids": self.input_ids_KL, "position_ids": self.position_ids_KL}
        if self.is_seen_KLL is None:
            return inputs
        return inputs | {"attention_mask": additive_mask(self.is_seen_KLL, dtype=dtype)}


def pack(micro_batch: MicroBatch) -> PackedRows:
    """Lays the rows of a micro-batch out as its `lines` say."""
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
    """Where each token of some rows lies in one line."""

    def __init__(self, rows: list[LongArray], *, shares_prefixes: bool) -> None:
        self._rows = rows
        self._shared: list[int] = []
        self.places: list[LongArray] = []
        """For each row, of each of its tokens."""
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
        """Fills arrays of zeros that are at least as long as the line."""
        for row, places, num_shared in zip(self._rows, self.places, self._shared, strict=True):
            input_ids_L[places] = row
            position_ids_L[places] = np.arange(len(row))
            if is_seen_LL is not None:
                added = places[num_shared:]
                is_seen_LL[np.ix_(added, places)] = np.tri(len(added), len(row), num_shared, dtype=np.bool_)
        if is_seen_LL is not None:
            np.fill_diagonal(is_seen_LL, True)


def additive_mask(is_seen_KLL: Tensor, *, dtype: torch.dtype) -> Tensor:
    """As every attention of `transformers` takes it, [K, 1, L, L]: added to the scores."""
    mask_KLL = torch.zeros(is_seen_KLL.shape, dtype=dtype, device=is_seen_KLL.device)
    return mask_KLL.masked_fill_(~is_seen_KLL, torch.finfo(dtype).min).unsqueeze(1)


def prove_lines(model: PreTrainedModel, *, config: OptimConfig) -> None:
    """Tries what the configuration asks of the model.

    Raises:
        ConfigError: The model does not do it.
    """
    if config.share_prefixes:
        prove_sharing(model)
    elif config.use_packing:
        prove_packing(model)


@torch.no_grad()
def prove_packing(model: PreTrainedModel) -> None:
    """Tries whether rows that share lines get the activations that they get alone.

    Raises:
        ConfigError: They do not: the model's attention sees across them.
    """
    ids_BW = torch.arange(12, device=model.device).view(4, 3)
    positions_BW = torch.arange(3, device=model.device).expand(4, 3)

    def activations(*, num_lines: int) -> Tensor:
        return _activations(
            model, ids_BW.reshape(num_lines, -1), position_ids=positions_BW.reshape(num_lines, -1)
        ).reshape(12, -1)

    difference = _difference(activations(num_lines=2), activations(num_lines=4))
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"use_packing is on, but {_kind(model)} attention lets packed rows see each other (activations differ by "
            f"{difference:.2g} of the largest); set use_packing=false"
        )


@torch.no_grad()
def prove_sharing(model: PreTrainedModel) -> None:
    """Tries whether rows that share a prefix get the activations that they get alone.

    Raises:
        ConfigError: They do not: the model's attention takes no mask of any form.
    """
    config: Any = cast(Any, model.config).get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    window = None if layer_types else getattr(config, "sliding_window", None)
    if window is not None or set(layer_types) - {"full_attention"}:
        raise ConfigError(
            f"share_prefixes is on, but {_kind(model)} attention is not full in every layer; set share_prefixes=false, "
            "or use_packing=true instead"
        )
    rows = [np.array([0, 1, 2, 3, 4]), np.array([0, 1, 5, 6])]
    line = _Line(rows, shares_prefixes=True)
    ids_L, positions_L = np.zeros((2, line.num_tokens), dtype=np.int64)
    is_seen_LL = np.zeros((line.num_tokens, line.num_tokens), dtype=np.bool_)
    line.write(ids_L, positions_L, is_seen_LL)
    ids_1L, positions_1L, is_seen_1LL = (
        cast(Any, torch).from_numpy(array).to(model.device).unsqueeze(0)
        for array in (ids_L, positions_L, is_seen_LL)
    )
    mask = additive_mask(is_seen_1LL, dtype=model.dtype)
    shared = _activations(model, ids_1L, position_ids=positions_1L, attention_mask=mask)[0]
    for row, places in zip(rows, line.places, strict=True):
        ids_1T = torch.tensor(row, device=model.device).unsqueeze(0)
        alone = _activations(model, ids_1T, position_ids=torch.arange(len(row), device=model.device)[None])[0]
        difference = _difference(shared[places], alone)
        if not difference <= TOLERANCE:
            raise ConfigError(
                f"share_prefixes is on, but {_kind(model)} attention does not follow the mask that this needs "
                f"(activations differ by {difference:.2g} of the largest); set share_prefixes=false"
            )


def _activations(model: PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:
    """Of some token ids, which may be more than the model knows."""
    ids = ids % cast(Any, model.config).get_text_config().vocab_size
    return cast(Any, model).base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state.float()


def _difference(found: Tensor, expected: Tensor) -> float:
    """As a share of the largest activation."""
    return float((found - expected).abs().max() / expected.abs().max())


def _kind(model: PreTrainedModel) -> str:
    config: Any = model.config
    return f"{config.model_type} with {config._attn_implementation}"
