"""KV cache of slots, and attention over it, registered as an attention implementation of `transformers`.

A model with the attention `ATTENTION_NAME` calls `_attend` in every layer with the tokens of one step, packed into a
single row. The caller of the model passes an `AttentionContext` as `attention_context`, which computes the attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from agent_loop.errors import ConfigError

ATTENTION_NAME = "agent_loop_slots"
UNSUPPORTED_OPTIONS = {
    "softcap": "soft-capping of attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shapes and type of the keys and values that one attention layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None for all before it."""


class KVCache:
    """One tensor of keys and one of values per layer, each [slots, kv_heads, max_len, head_dim].

    The cache is allocated as zeros and must never contain NaN. Attention reads masked positions past the end of a
    sequence, and a masked NaN is still NaN.
    """

    def __init__(self, layers: list[LayerShape], *, num_slots: int, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.kv_head_counts = frozenset(layer.num_kv_heads for layer in layers)
        self.windows = frozenset(_shorter(layer.window, max_model_len) for layer in layers)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in layers:
            rows = (num_slots, layer.num_kv_heads, max_model_len)
            self.keys.append(torch.zeros((*rows, layer.key_dim), dtype=layer.dtype, device=layer.device))
            self.values.append(torch.zeros((*rows, layer.value_dim), dtype=layer.dtype, device=layer.device))
        # Views with one row per slot, head and position, because writing rows by index is fastest.
        self._key_rows = [keys.view(-1, keys.shape[-1]) for keys in self.keys]
        self._value_rows = [values.view(-1, values.shape[-1]) for values in self.values]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, *, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the keys and values of new tokens.

        Args:
            layer: Number of the layer.
            rows: Indices of the rows to write, [tokens * kv_heads].
            key: Shape [1, kv_heads, tokens, head_dim].
            value: Shape [1, kv_heads, tokens, head_dim].
        """
        self._key_rows[layer].index_copy_(0, rows, key[0].transpose(0, 1).reshape(-1, key.shape[-1]))
        self._value_rows[layer].index_copy_(0, rows, value[0].transpose(0, 1).reshape(-1, value.shape[-1]))

    def copy_prefix(self, *, source: int, target: int, start: int, end: int) -> None:
        """Copy the positions from `start` to `end` of slot `source` to slot `target`."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, start:end] = tensor[source, :, start:end]

    def zero(self, slot: int) -> None:
        """Set the cache of a slot to zero."""
        for tensor in (*self.keys, *self.values):
            tensor[slot] = 0


class AttentionContext(Protocol):
    """Computes the attention layers of one forward."""

    @property
    def max_model_len(self) -> int: ...

    def attend(
        self,
        layer: int,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Compute attention for query, key and value, each [1, heads, tokens, head_dim].

        Args:
            layer: Number of the layer.
            query: Queries of the step's tokens.
            key: Their keys.
            value: Their values.
            scaling: Factor of the scores; None for one over the root of `head_dim`.
            window: Number of tokens that a token attends to, if it is shorter than `max_model_len`.

        Returns:
            Shape [1, tokens, heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Slots with a few new tokens each, padded to the same number and computed by one attention call."""

    rows: Tensor
    """Rows of the step, [slots * count]. Padding repeats a row of the group."""
    kept: Tensor | None
    """Indices into `rows` that are not padding, in the order of the step; None if none is padding."""
    slots: slice | Tensor
    """A slice of slots is read in place; an index tensor, [slots], is gathered first."""
    positions: slice
    """Positions that are read, up to the end of the longest sequence."""
    mask: Tensor | None
    """Mask that is added to the scores, [slots, 1, count, positions]. None if nothing is hidden."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Many consecutive new tokens of one slot."""

    row_start: int
    row_end: int
    slot: int
    positions: slice
    """Positions that are read, up to the end of the chunk."""
    mask: Tensor | None
    """Mask that is added to the scores, [chunk, positions]. None if each token sees the chunk up to itself."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Parts of the cache that the layers with one window read."""

    groups: tuple[SlotGroup, ...]
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class SlotAttention:
    """Attention of one step: writes the new tokens to the cache, then reads the cache."""

    cache: KVCache
    max_model_len: int
    cache_rows: dict[int, Tensor]
    """Argument `rows` of `KVCache.write` for the new tokens, by number of KV heads."""
    reads: Mapping[int | None, Reads]
    """By the layer's window; None for layers that read whole sequences."""

    def attend(
        self,
        layer: int,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        self.cache.write(layer, rows=self.cache_rows[key.shape[1]], key=key, value=value)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        groups, chunks = self.reads[window].groups, self.reads[window].chunks
        parts = [_attend_group(g, query=query, keys=keys, values=values, scaling=scaling) for g in groups]
        parts += [_attend_chunk(c, query=query, keys=keys, values=values, scaling=scaling) for c in chunks]
        # Some models view the result in another shape.
        return (parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


@dataclass(slots=True)
class ShapeProbe:
    """Plain causal attention that records the shapes that each layer would store."""

    max_model_len: int
    layers: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])

    def attend(
        self,
        layer: int,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        self.layers[layer] = LayerShape(
            key.shape[1], key.shape[-1], value.shape[-1], key.dtype, key.device, window
        )
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        ).transpose(1, 2)


def _attend_group(
    group: SlotGroup, *, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Compute a group. Query heads that share a KV head are computed as tokens of one query head.

    Returns:
        Shape [kept, heads, value_dim].
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    num_sharing = num_heads // num_kv_heads
    keys, values = keys[:, :, group.positions], values[:, :, group.positions]
    if isinstance(group.slots, slice):
        keys, values = keys[group.slots], values[group.slots]
    else:
        keys, values = keys.index_select(0, group.slots), values.index_select(0, group.slots)
    num_slots, count = len(keys), len(group.rows) // len(keys)
    query_rows = query[0].index_select(1, group.rows).view(num_heads, num_slots, count, -1).transpose(0, 1)
    mask = group.mask
    if mask is not None and count > 1:
        mask = mask.unsqueeze(2).expand(-1, -1, num_sharing, -1, -1).flatten(2, 3)
    attended = scaled_dot_product_attention(
        query_rows.reshape(num_slots, num_kv_heads, num_sharing * count, -1),
        keys,
        values,
        attn_mask=mask,
        scale=scaling,
    )
    rows = attended.reshape(num_slots, num_heads, count, -1).transpose(1, 2).flatten(0, 1)
    return rows if group.kept is None else rows.index_select(0, group.kept)


def _attend_chunk(
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
        keys[chunk.slot, :, chunk.positions].unsqueeze(1).expand(shared),
        values[chunk.slot, :, chunk.positions].unsqueeze(1).expand(shared),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
    )
    return attended.flatten(0, 1).transpose(0, 1)


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
    for option, meaning in UNSUPPORTED_OPTIONS.items():
        if options.get(option) is not None:
            raise ConfigError(f"{type(module).__name__} uses {meaning} ({option})")
    attended = attention_context.attend(
        module.layer_idx,
        query=query,
        key=key,
        value=value,
        scaling=scaling,
        window=_shorter(sliding_window, attention_context.max_model_len),
    )
    return attended, None


def _shorter(window: int | None, length: int) -> int | None:
    """Return a window that hides something in sequences of this length, or None."""
    return window if window is not None and window < length else None


# No mask function is registered under the name: `transformers` then builds no mask.
cast(Any, AttentionInterface).register(ATTENTION_NAME, _attend)
