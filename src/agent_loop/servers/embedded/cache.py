"""KV cache of all slots and layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shapes and type of the keys and values that one attention layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """One tensor of keys and one of values per layer, each [slots, kv_heads, max_len, head_dim].

    The cache is allocated as zeros and must never contain NaN. Attention reads masked positions past the end of a
    sequence, and a masked NaN is still NaN.
    """

    def __init__(self, layers: list[LayerShape], *, num_slots: int, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.kv_head_counts = frozenset(layer.num_kv_heads for layer in layers)
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
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

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
