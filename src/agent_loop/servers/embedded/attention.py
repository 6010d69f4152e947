"""Attention over the slots of a KV cache, registered as an attention implementation of `transformers`.

A model with the attention `ATTENTION_NAME` calls `_attend` in every layer with the tokens of one step, packed into a
single row. The caller of the model passes an `AttentionContext` as `attention_context`, which computes the attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.cache import KVCache, LayerShape
from agent_loop.servers.embedded.config import CONTEXT

ATTENTION_NAME = "agent_loop_slots"
UNSUPPORTED_OPTIONS = {
    "softcap": "soft-capping of attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


class AttentionContext(Protocol):
    """Computes the attention layers of one forward."""

    @property
    def max_model_len(self) -> int: ...

    def attend(
        self, layer: int, *, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """Compute attention for query, key and value, each [1, heads, tokens, head_dim].

        Returns:
            Shape [1, tokens, heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one new token each, computed by one attention call."""

    row_start: int
    row_end: int
    slots: slice | Tensor
    """A slice of slots is read in place; an index tensor, [rows], is gathered first."""
    length: int
    """Length of the longest row, including its new token."""
    mask: Tensor | None
    """Mask that is added to the scores, [slots, 1, 1, length]. None if all rows have the same length."""
    positions_in_range: Tensor | None = None
    """Positions of the rows within the slice, [rows]. None if the slice has no other slots."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive new tokens of one slot."""

    row_start: int
    row_end: int
    slot: int
    length: int
    """Length of the sequence, including the chunk."""
    mask: Tensor | None
    """Mask that is added to the scores, [chunk, length]. None if the chunk starts the sequence."""


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Short chunks, padded to the longest and computed by one attention call."""

    rows: Tensor
    """Rows of the step, [chunks * count]. Padding repeats a row of its chunk."""
    kept: Tensor
    """Indices into `rows` that are not padding, in the order of the step."""
    slots: Tensor
    """Slot of each chunk, [chunks]."""
    length: int
    """Length of the longest sequence, including its chunk."""
    mask: Tensor
    """Mask that is added to the scores, [chunks, 1, count, length]."""


@dataclass(frozen=True, slots=True)
class SlotAttention:
    """Attention of one step: writes the new tokens to the cache, then reads the cache."""

    cache: KVCache
    max_model_len: int
    cache_rows: dict[int, Tensor]
    """Argument `rows` of `KVCache.write` for the new tokens, by number of KV heads."""
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk | PrefillGroup, ...]

    def attend(
        self, layer: int, *, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        self.cache.write(layer, rows=self.cache_rows[key.shape[1]], key=key, value=value)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        parts = [
            _decode(group, query=query, keys=keys, values=values, scaling=scaling) for group in self.groups
        ]
        parts += [
            (_prefill_group if isinstance(chunk, PrefillGroup) else _prefill)(
                cast(Any, chunk), query=query, keys=keys, values=values, scaling=scaling
            )
            for chunk in self.chunks
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


@dataclass(slots=True)
class ShapeProbe:
    """Plain causal attention that records the shapes that each layer would store."""

    max_model_len: int
    layers: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])

    def attend(
        self, layer: int, *, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        self.layers[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype, key.device)
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        ).transpose(1, 2)


def _decode(
    group: DecodeGroup, *, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Compute decoding rows. Query heads that share a KV head are computed as tokens of one query head.

    Returns:
        Shape [rows, heads, value_dim].
    """
    num_rows, num_kv_heads = group.row_end - group.row_start, keys.shape[1]
    query_rows = query[0, :, group.row_start : group.row_end].transpose(0, 1)
    query_rows = query_rows.reshape(num_rows, num_kv_heads, -1, query.shape[-1])
    if isinstance(group.slots, slice):
        keys, values = keys[group.slots, :, : group.length], values[group.slots, :, : group.length]
    else:
        keys = keys[:, :, : group.length].index_select(0, group.slots)
        values = values[:, :, : group.length].index_select(0, group.slots)
    if group.positions_in_range is not None:
        spread = query_rows.new_zeros((keys.shape[0], *query_rows.shape[1:]))
        query_rows = spread.index_copy_(0, group.positions_in_range, query_rows)
    attended = scaled_dot_product_attention(query_rows, keys, values, attn_mask=group.mask, scale=scaling)
    if group.positions_in_range is not None:
        attended = attended.index_select(0, group.positions_in_range)
    return attended.reshape(num_rows, -1, values.shape[-1])


def _prefill(
    chunk: PrefillChunk, *, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Compute a chunk with the KV heads as the batch. A KV head is expanded, not copied, for the query heads that share
    it.

    Returns:
        Shape [chunk, heads, value_dim].
    """
    num_kv_heads, count = keys.shape[1], chunk.row_end - chunk.row_start
    query_rows = query[0, :, chunk.row_start : chunk.row_end]
    query_rows = query_rows.reshape(num_kv_heads, -1, count, query.shape[-1])
    shared = (-1, query_rows.shape[1], -1, -1)
    attended = scaled_dot_product_attention(
        query_rows,
        keys[chunk.slot, :, : chunk.length].unsqueeze(1).expand(shared),
        values[chunk.slot, :, : chunk.length].unsqueeze(1).expand(shared),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
    )
    return attended.flatten(0, 1).transpose(0, 1)


def _prefill_group(
    group: PrefillGroup, *, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Compute a group of short chunks. Query heads that share a KV head are computed as in `_decode`.

    Returns:
        Shape [kept, heads, value_dim].
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    num_chunks, _, count, _ = group.mask.shape
    query_rows = query[0].index_select(1, group.rows).view(num_heads, num_chunks, count, -1).transpose(0, 1)
    num_sharing = num_heads // num_kv_heads
    mask = group.mask.unsqueeze(2).expand(-1, -1, num_sharing, -1, -1).flatten(2, 3)
    attended = scaled_dot_product_attention(
        query_rows.reshape(num_chunks, num_kv_heads, num_sharing * count, -1),
        keys[:, :, : group.length].index_select(0, group.slots),
        values[:, :, : group.length].index_select(0, group.slots),
        attn_mask=mask,
        scale=scaling,
    )
    rows = attended.reshape(num_chunks, num_heads, count, -1).transpose(1, 2).flatten(0, 1)
    return rows.index_select(0, group.kept)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if attention_context is None:
        raise ConfigError(
            f"{type(module).__name__} was called without an attention context: either the model does not pass "
            "keyword arguments to its attention, or other code called a model that an embedded server owns; "
            "give the server its own copy"
        )
    _check_options(module, attention_context, sliding_window=sliding_window, options=options)
    attended = attention_context.attend(module.layer_idx, query=query, key=key, value=value, scaling=scaling)
    return attended, None


def _check_options(
    module: Any, context: AttentionContext, *, sliding_window: int | None, options: dict[str, Any]
) -> None:
    if sliding_window is not None and sliding_window < context.max_model_len:
        raise ConfigError(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens, below {CONTEXT} of "
            f"{context.max_model_len} tokens"
        )
    for option, meaning in UNSUPPORTED_OPTIONS.items():
        if options.get(option) is not None:
            raise ConfigError(f"{type(module).__name__} uses {meaning} ({option})")


# No mask function is registered under the name: `transformers` then builds no mask.
cast(Any, AttentionInterface).register(ATTENTION_NAME, _attend)
