"""Forward passes of training: log-probs or values before each sampled token of a micro-batch.

B rows, R response width, W prompt and response, M sampled tokens, N positions before them, K candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from agent_loop.config import OptimConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.model_types import can_pad, can_share_prefixes, logit_scaling
from agent_loop.servers.embedded.vision import VISION_MODELS, media_features
from agent_loop.training.adapters import is_low_rank
from agent_loop.training.losses.logprobs import (
    LinearHead,
    LogitTransform,
    blockwise_logprobs,
    token_logprobs,
)
from agent_loop.training.micro_batches import Layout, MicroBatch
from agent_loop.training.prefix_tree.attention import tree_inputs, use_tree_attention, uses_tree_attention
from agent_loop.training.prefix_tree.layout import TreeLayout, lay_out

ResultT = TypeVar("ResultT")
logger = logging.getLogger(__name__)


def prepare_layout(model: PreTrainedModel, *, config: OptimConfig) -> None:
    """Give a model the attention of prefix trees, if the table of model types has its type."""
    if config.share_prefixes and can_share_prefixes(model):
        use_tree_attention(model)
    elif not can_pad(model):
        logger.warning(
            "%s is of a type (%s) that is not proved for padded rows; each row is computed in a forward of its own, "
            "which is slower",
            type(model).__name__,
            model.config.model_type,
        )


def layout_of(model: PreTrainedModel) -> Layout:
    """Return how the rows of a micro-batch are laid out for a model."""
    if uses_tree_attention(model):
        return "tree"
    return "padded" if can_pad(model) else "alone"


@dataclass(frozen=True, slots=True)
class ResponseLogProbs:
    """Log-probs and entropies at the sampled tokens of a micro-batch; 0 elsewhere. All have gradients."""

    sampled_BR: Tensor
    entropy_BR: Tensor
    """Entropy in nats. It has no gradient if `entropy_has_gradient` was False."""
    candidates_BRK: Tensor | None
    """Log-probs of the candidates in place of each sampled token; None if there were no candidates."""


def response_logprobs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    temperature: float,
    entropy_has_gradient: bool = True,
    candidate_ids_BRK: Tensor | None = None,
) -> ResponseLogProbs:
    """Return the log-probs of the sampled tokens and of candidates in their places, and the entropy at each place.

    They are computed in blocks of the vocabulary, or from all logits if the table of model types does not have the
    model's head. Without `entropy_has_gradient`, the entropy is for metrics only. Candidates at tokens that were not
    sampled are ignored.
    """
    tokens = _sampled_tokens(model, micro_batch)
    options: dict[str, Any] = {
        "token_ids_M": tokens.token_ids_M,
        "place_M": tokens.place_M,
        "temperature": temperature,
        "entropy_has_gradient": entropy_has_gradient,
        "candidate_ids_MK": None if candidate_ids_BRK is None else candidate_ids_BRK[tokens.mask_BR.bool()],
    }
    scaling, head = logit_scaling(model), cast(Any, model).get_output_embeddings()
    if scaling is not None and _is_linear(head):
        transform = LogitTransform(*scaling)
        found = _apply_at_head(
            model,
            tokens,
            lambda head, hidden_NH: blockwise_logprobs(_linear_head(head, hidden_NH, transform), **options),
        )
    else:
        found = token_logprobs(_outputs(model, tokens), **options)
    return ResponseLogProbs(
        tokens.spread(found.sampled_M),
        tokens.spread(found.entropy_M),
        None if found.candidates_MK is None else tokens.spread(found.candidates_MK),
    )


def response_values(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return the values of a critic, [B, R]; float32, or float64 if the outputs are float64."""
    tokens = _sampled_tokens(model, micro_batch)
    values_N = _outputs(model, tokens).squeeze(-1)
    precise_N = values_N.to(torch.promote_types(values_N.dtype, torch.float32))
    return tokens.spread(precise_N[tokens.place_M])


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """Sampled tokens of a micro-batch, and the positions before them. Rows that share a prefix share positions."""

    inputs: dict[str, Any]
    """Arguments of the model."""
    before_N: Tensor
    """Positions in the flattened input."""
    place_M: Tensor
    """Index of the position before each token, among the N; row by row."""
    token_ids_M: Tensor
    mask_BR: Tensor
    """1 at sampled tokens."""

    def spread(self, values_M: Tensor) -> Tensor:
        """Return values of tokens, [M] or [M, K], in rows and columns, [B, R] or [B, R, K]; 0 elsewhere."""
        spread = values_M.new_zeros((*self.mask_BR.shape, *values_M.shape[1:]))
        return spread.index_put(self.mask_BR.nonzero(as_tuple=True), values_M)


def _sampled_tokens(model: PreTrainedModel, micro_batch: MicroBatch) -> _SampledTokens:
    """Return the sampled tokens, with the input that predicts them. Each prompt has a token before the first one."""
    mask_BR = micro_batch.mask_BR
    token_ids_M = micro_batch.response_ids_BR[mask_BR.bool()]
    if micro_batch.is_tree:
        layout, before_M = as_tree(micro_batch)
        before_N, place_M = cast(tuple[Tensor, Tensor], cast(Any, before_M).unique(return_inverse=True))
        return _SampledTokens(tree_inputs(model, layout), before_N, place_M, token_ids_M, mask_BR)
    num_rows, width = micro_batch.input_ids_BW.shape
    places_BW = torch.arange(num_rows * width, device=mask_BR.device).view(num_rows, width)
    before_N = places_BW[:, -mask_BR.shape[1] - 1 : -1][mask_BR.bool()]
    place_M = torch.arange(len(before_N), device=mask_BR.device)
    return _SampledTokens(_padded_inputs(model, micro_batch), before_N, place_M, token_ids_M, mask_BR)


def as_tree(micro_batch: MicroBatch) -> tuple[TreeLayout, Tensor]:
    """Return the prefix tree of the rows of a micro-batch, and the position before each sampled token, [M]."""
    device = micro_batch.input_ids_BW.device
    is_token_BW = micro_batch.attention_mask_BW.bool().cpu().numpy()
    ids_BW = micro_batch.input_ids_BW.cpu().numpy()
    layout = lay_out(
        [ids_W[is_token_W] for ids_W, is_token_W in zip(ids_BW, is_token_BW, strict=True)], device=device
    )
    mask_BR = micro_batch.mask_BR.bool().cpu().numpy()
    lengths_B: list[int] = cast(Any, micro_batch.is_response_BR.sum(dim=1)).tolist()
    before = [
        places[len(places) - length - 1 : -1][mask_R[:length]]
        for places, mask_R, length in zip(layout.places, mask_BR, lengths_B, strict=True)
    ]
    return layout, cast(Any, torch).from_numpy(np.concatenate(before)).to(device)


def _padded_inputs(model: PreTrainedModel, micro_batch: MicroBatch) -> dict[str, Tensor]:
    if micro_batch.is_one_plain_row:
        return {"input_ids": micro_batch.input_ids_BW}
    inputs = {"attention_mask": micro_batch.attention_mask_BW, "position_ids": micro_batch.position_ids}
    if any(micro_batch.attachments):
        return inputs | {"inputs_embeds": _embed(model, micro_batch)}
    return inputs | {"input_ids": micro_batch.input_ids_BW}


def _embed(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return token embeddings with the features of images in their places, [B, W, hidden]; both have gradients."""
    kind = model.config.model_type
    if kind not in VISION_MODELS:
        raise ConfigError(
            f"the batch has images, but {kind} is not trained with them; use a model of "
            f"{', '.join(sorted(VISION_MODELS))}"
        )
    embeds_BWH = cast(Any, model).get_input_embeddings()(micro_batch.input_ids_BW)
    for row, attachments in enumerate(micro_batch.attachments):
        for attachment in attachments:
            run = micro_batch.input_ids_BW[row, attachment.start : attachment.end]
            places = (run == attachment.placeholder_id).nonzero().flatten() + attachment.start
            features = media_features(model, attachment, num_placeholders=len(places))
            embeds_BWH = embeds_BWH.index_put((torch.full_like(places, row), places), features)
    return embeds_BWH


def _outputs(model: PreTrainedModel, tokens: _SampledTokens) -> Tensor:
    """Return the outputs of a model before the sampled tokens, [N, outputs]."""
    outputs = cast(nn.Module, model)(**tokens.inputs, use_cache=False).logits
    return outputs.flatten(0, 1).index_select(0, tokens.before_N)


def _apply_at_head(
    model: PreTrainedModel, tokens: _SampledTokens, function: Callable[[nn.Module, Tensor], ResultT]
) -> ResultT:
    """Call a function in place of the head, with the head and its input before the sampled tokens, [N, hidden].

    The call is part of the model's forward, while the weights of a sharded head are gathered.
    """
    results: list[ResultT] = []

    def call(head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_KLH, *others = arguments
        hidden_NH = hidden_KLH.flatten(0, 1).index_select(0, tokens.before_N)
        results.append(function(head, hidden_NH))
        return (hidden_NH[None, :1].detach(), *others)  # the head computes one position, which nothing reads

    hook = cast(Any, model).get_output_embeddings().register_forward_pre_hook(call)
    try:
        cast(nn.Module, model)(**tokens.inputs, use_cache=False)
    finally:
        hook.remove()
    return results[0]


def _is_linear(head: nn.Module) -> bool:
    """Return whether this is a linear layer, with or without low-rank adapters."""
    base: Any = getattr(head, "base_layer", head)
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        return False
    return base is head or is_low_rank(head)


def _linear_head(head: nn.Module, hidden_NH: Tensor, transform: LogitTransform) -> LinearHead:
    """Return the head of a model as products of matrices."""
    base: Any = getattr(head, "base_layer", head)
    products = [(hidden_NH, base.weight)]
    if base is not head:
        products += _adapter_products(head, hidden_NH)
    inputs, weights = zip(*products, strict=True)
    return LinearHead(inputs, weights, base.bias, transform)


def _adapter_products(layer: Any, hidden_NH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for adapter in () if layer.disable_adapters else layer.active_adapters:
        if adapter in layer.lora_A:
            down_NR = functional.linear(hidden_NH, layer.lora_A[adapter].weight)
            yield down_NR * layer.scaling[adapter], layer.lora_B[adapter].weight
