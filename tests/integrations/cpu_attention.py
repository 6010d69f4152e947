"""What stands in, on a CPU, for the GPU kernel that `AsyncGRPOTrainer` attends with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class CpuFlashAttention:
    """The one function that TRL calls of the kernel, for segments that attend to the paths that lead to them."""

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
        """Causal attention whose mask is aligned with the end of the keys; all of shape [tokens, heads, head_dim]."""
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
