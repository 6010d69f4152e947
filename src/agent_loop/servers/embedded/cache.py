"""Keys and values of all slots, for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """One tensor of keys and one of values per layer, each [slots, kv_heads, max_len, head_dim].

    Allocated as zeros, and never left with NaN: attention reads past a sequence's end under a mask, and a masked
    NaN would still be a NaN.
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
        # The same memory as one row per slot, head and position: writing rows by index is fastest.
        self._key_rows = [keys.view(-1, keys.shape[-1]) for keys in self.keys]
        self._value_rows = [values.view(-1, values.shape[-1]) for values in self.values]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def write(self, layer: int, *, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores new tokens' keys and values, each [1, kv_heads, tokens, head_dim], at `rows` [tokens * kv_heads]."""
        self._key_rows[layer].index_copy_(0, rows, key[0].transpose(0, 1).reshape(-1, key.shape[-1]))
        self._value_rows[layer].index_copy_(0, rows, value[0].transpose(0, 1).reshape(-1, value.shape[-1]))

    def copy_prefix(self, *, source: int, target: int, start: int, end: int) -> None:
        """Copies the positions from `start` to `end` of one slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, start:end] = tensor[source, :, start:end]

    def zero(self, slot: int) -> None:
        """Wipes one slot."""
        for tensor in (*self.keys, *self.values):
            tensor[slot] = 0
