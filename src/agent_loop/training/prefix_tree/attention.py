"""Attention over a prefix tree, registered as an attention implementation of `transformers`.

A model with the attention `ATTENTION_NAME` computes a line of tokens whose layout is the argument `prefix_tree`.
Without a layout, the attention is torch's own. On a CPU, each block of the layout is one call of torch's flash
attention, and the outputs of a query are merged by their log-sum-exp. On other devices, FlexAttention computes the
line; no machine with a GPU has run it. T tokens, H query heads, D numbers per head.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.attention import UNSUPPORTED_OPTIONS
from agent_loop.servers.embedded.runner import text_config_of
from agent_loop.training.prefix_tree.layout import Blocks, TreeLayout, is_visible, lowest_visible

ATTENTION_NAME = "agent_loop_prefix_tree"
MAX_COMPILATIONS = 64
"""Variants of compiled attention: types, windows, gradients and sizes multiply. Beyond torch's own limit of 8,
FlexAttention would hold the scores of all pairs."""
_plain: Any = cast(Any, AttentionInterface())["sdpa"]
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def use_tree_attention(model: PreTrainedModel) -> None:
    """Set the attention implementation of a model. A vision tower keeps its own."""
    is_whole = text_config_of(model.config) is model.config
    cast(Any, model).set_attn_implementation(ATTENTION_NAME if is_whole else {"text_config": ATTENTION_NAME})


def uses_tree_attention(model: PreTrainedModel) -> bool:
    return text_config_of(model.config)._attn_implementation == ATTENTION_NAME


def tree_inputs(model: PreTrainedModel, layout: TreeLayout) -> dict[str, Any]:
    """Return the arguments of a model for a tree."""
    return {
        "input_ids": layout.input_ids_T[None],
        "position_ids": layout.depth_T[None],
        # `transformers` passes a mask with four dimensions on as it is, and makes none of its own.
        "attention_mask": torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=layout.depth_T.device),
        "prefix_tree": layout,
    }


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    prefix_tree: TreeLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if prefix_tree is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise ConfigError(f"{type(module).__name__} does not get the keyword arguments of the model")
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return _plain(module, query, key, value, attention_mask, **options)
    _check_options(module, dropout=dropout, options=options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = _blockwise if query.device.type == "cpu" else _flex
    attended = attend(query, key, value, layout=prefix_tree, window=sliding_window, scale=scale)
    return attended.transpose(1, 2), None


def _check_options(module: Any, *, dropout: float, options: dict[str, Any]) -> None:
    name = type(module).__name__
    if dropout:
        raise ConfigError(f"{name} uses dropout of attention weights ({dropout})")
    for option, meaning in UNSUPPORTED_OPTIONS.items():
        if options.get(option) is not None:
            raise ConfigError(f"{name} uses {meaning} ({option})")


def _blockwise(
    query: Tensor, key: Tensor, value: Tensor, *, layout: TreeLayout, window: int | None, scale: float
) -> Tensor:
    """Return the attention of each query, [1, H, T, D], where D is that of the values."""
    value_dim = value.shape[-1]
    if value_dim != query.shape[-1]:  # the kernel needs equal sizes, and zeros change nothing
        widest = max(value_dim, query.shape[-1])
        query, key, value = (pad(each, (0, widest - each.shape[-1])) for each in (query, key, value))
    query, key, value = (_adjacent(each) for each in (query, key, value))
    attended: Tensor = cast(Any, _Blocks).apply(query, key, value, layout.blocks_for(window), scale)
    return attended[..., :value_dim]


class _Blocks(Function):
    """Attention as a sum over blocks. The sums are float32 or more precise, for any dtype of the model.

    The backward pass of a block needs the merged outputs and log-sum-exp only, because the weight of each key is
    `exp(score - log-sum-exp)`.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float) -> Tensor:
        out, logsumexp = _sums(query), _sums(query[..., :1]).squeeze(-1).fill_(-torch.inf)
        for block in blocks:
            rows = block.queries
            part, part_logsumexp = _flash(
                query[:, :, rows],
                key[:, :, block.keys],
                value[:, :, block.keys],
                0.0,
                block.is_causal,
                attn_mask=_mask(block.mask, query),
                scale=scale,
            )
            merged = logsumexp[:, :, rows]
            share = (part_logsumexp - merged).sigmoid_().unsqueeze(-1)
            out[:, :, rows].lerp_(part.to(out.dtype), share)
            merged.copy_(torch.logaddexp(merged, part_logsumexp))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, logsumexp = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        grad_out = _adjacent(grad_out)
        sums = tuple(_sums(each) for each in (query, key, value))
        for block in blocks:
            rows, keys = block.queries, block.keys
            parts = _flash_backward(
                grad_out[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, rows],
                logsumexp[:, :, rows],
                0.0,
                block.is_causal,
                attn_mask=_mask(block.mask, query),
                scale=ctx.scale,
            )
            for total, part, run in zip(sums, parts, (rows, keys, keys), strict=True):
                total[:, :, run] += part
        grads = (total.to(each.dtype) for total, each in zip(sums, (query, key, value), strict=True))
        return (*grads, None, None)


def _sums(like: Tensor) -> Tensor:
    """Return zeros of the same shape, [1, H, T, D], whose heads are next to each other in memory."""
    one, num_heads, num_tokens, size = like.shape
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros((one, num_tokens, num_heads, size), dtype=dtype, device=like.device).transpose(1, 2)


def _adjacent(values: Tensor) -> Tensor:
    """Return a tensor whose last dimension is adjacent in memory, as the kernels assume without a check."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(query.dtype)


def _flex(
    query: Tensor, key: Tensor, value: Tensor, *, layout: TreeLayout, window: int | None, scale: float
) -> Tensor:
    """Return the attention of each query, [1, H, T, D], by FlexAttention."""
    attend, create_mask = _flex_functions(query.device.type)
    depth_T, end_T, lowest_T = layout.depth_T, layout.end_T, lowest_visible(layout.depth_T, window)

    def mask(batch: Tensor, head: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return is_visible(queries, keys, depth_T=depth_T, end_T=end_T, lowest_T=lowest_T)

    if window not in layout.flex_masks:
        num_tokens, device = layout.num_tokens, str(query.device)
        layout.flex_masks[window] = create_mask(mask, None, None, num_tokens, num_tokens, device=device)
    return attend(query, key, value, block_mask=layout.flex_masks[window], scale=scale, enable_gqa=True)


@cache
def _flex_functions(device: str) -> tuple[Any, Any]:
    """Return the functions of FlexAttention, compiled except on a CPU, where tests run them as they are."""
    from torch.nn.attention import flex_attention as flex

    if device == "cpu":
        return flex.flex_attention, flex.create_block_mask
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_COMPILATIONS)
    compiled: Any = cast(Any, torch).compile
    return compiled(flex.flex_attention, dynamic=True), compiled(flex.create_block_mask, dynamic=True)


cast(Any, AttentionInterface).register(ATTENTION_NAME, _attend)
cast(Any, AttentionMaskInterface).register(ATTENTION_NAME, cast(Any, AttentionMaskInterface())["sdpa"])
