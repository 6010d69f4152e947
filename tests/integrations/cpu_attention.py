"""CPU stub for the GPU attention kernel of `AsyncGRPOTrainer`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class CpuFlashAttention:
    """Stub of the kernel with the only function that TRL calls, for segments that attend to their prefixes."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> Tensor:
        """Return causal attention with the mask aligned to the end of the keys. Shapes are [tokens, heads,
        head_dim]."""
        segments: list[Tensor] = []
        borders = zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True)
        for (first, end), (first_key, end_key) in borders:
            num_queries, num_keys = end - first, end_key - first_key
            is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
            attended = scaled_dot_product_attention(
                query[first:end].transpose(0, 1),
                key[first_key:end_key].transpose(0, 1),
                value[first_key:end_key].transpose(0, 1),
                attn_mask=is_seen,
                scale=softmax_scale,
                enable_gqa=True,
            )
            segments.append(attended.transpose(0, 1))
        return torch.cat(segments)
