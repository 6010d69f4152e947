"""Forward passes of training: the outputs of a model before each sampled token.

B rows, R response width, W prompt and response, M sampled tokens, N positions before them, X outputs per position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_loop.config import OptimConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.model_types import can_pad, can_share_prefixes
from agent_loop.servers.embedded.vision import VISION_MODELS, media_features
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.prefix_tree.attention import tree_inputs, use_tree_attention
from agent_loop.training.prefix_tree.layout import TreeLayout, lay_out

ResultT = TypeVar("ResultT")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledTokens:
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


def prepare_batching(model: PreTrainedModel, *, config: OptimConfig, section: str) -> bool:
    """Give a model the attention of prefix trees if it needs it, and return whether its rows may be padded.

    `section` names `config` in messages: `actor` or `critic`.
    """
    name, kind = type(model).__name__, model.config.model_type
    if config.share_prefixes:
        reason = None if can_share_prefixes(model) else f"is of a type ({kind}) that is not proved for it"
        try:
            use_tree_attention(model)
        except ConfigError as error:
            reason = str(error)
        if reason is not None:
            key = f"{section}.share_prefixes"
            raise ConfigError(f"{key} is on, but {name} {reason}; set {key}=false")
    pads = can_pad(model)
    if not pads and not config.share_prefixes:
        logger.warning(
            "%s: each row is computed in a forward of its own, which is slower, because %s is of a type (%s) that is "
            "not proved for padded rows",
            section,
            name,
            kind,
        )
    return pads


def sampled_tokens(model: PreTrainedModel, micro_batch: MicroBatch) -> SampledTokens:
    """Return the sampled tokens of a micro-batch, with the input that predicts them.

    Prompts must not be empty, because the first response token needs a token before it.
    """
    mask_BR = micro_batch.mask_BR
    inputs, before_M = model_inputs(model, micro_batch)
    before_N, place_M = before_M, torch.arange(len(before_M), device=before_M.device)
    if micro_batch.shares_prefixes:
        before_N, place_M = cast(tuple[Tensor, Tensor], cast(Any, before_M).unique(return_inverse=True))
    return SampledTokens(inputs, before_N, place_M, micro_batch.response_ids_BR[mask_BR.bool()], mask_BR)


def model_inputs(model: PreTrainedModel, micro_batch: MicroBatch) -> tuple[dict[str, Any], Tensor]:
    """Return the model's arguments, and the position before each sampled token in the flattened input, [M]."""
    if micro_batch.shares_prefixes:
        layout, before_M = as_tree(micro_batch)
        return tree_inputs(model, layout), before_M
    return _padded_inputs(model, micro_batch), _places_before(micro_batch)


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


def _places_before(micro_batch: MicroBatch) -> Tensor:
    """Return the position before each sampled token in the flattened input, [M]."""
    num_rows, width = micro_batch.input_ids_BW.shape
    places_BW = torch.arange(num_rows * width, device=micro_batch.mask_BR.device).view(num_rows, width)
    response_width = micro_batch.mask_BR.shape[1]
    return places_BW[:, -response_width - 1 : -1][micro_batch.mask_BR.bool()]


def outputs_at(model: PreTrainedModel, places_N: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Return the outputs at some positions of the flattened input, [N, X]. A head of logits computes only these."""
    is_made = False

    def select(head: nn.Module, hidden_NH: Tensor) -> Tensor:
        nonlocal is_made
        is_made = True
        return hidden_NH

    outputs_NX = _outputs(model, places_N, inputs, at_head=select)
    return outputs_NX if is_made else outputs_NX.index_select(0, places_N)


def apply_at_head(
    model: PreTrainedModel,
    places_N: Tensor,
    inputs: dict[str, Any],
    function: Callable[[nn.Module, Tensor], ResultT],
) -> ResultT | None:
    """Call a function in place of the head, with the head and its input at some positions, [N, hidden].

    The call is part of the model's forward, while the weights of a sharded head are gathered.

    Returns:
        Result of the function; None if the model does not call a head.
    """
    results: list[ResultT] = []

    def call(head: nn.Module, hidden_NH: Tensor) -> Tensor:
        results.append(function(head, hidden_NH))
        return hidden_NH[:1].detach()  # the head computes one position, which nothing reads

    _outputs(model, places_N, inputs, at_head=call)
    return results[0] if results else None


def _outputs(
    model: PreTrainedModel,
    places_N: Tensor,
    inputs: dict[str, Any],
    *,
    at_head: Callable[[nn.Module, Tensor], Tensor],
) -> Tensor:
    """Return the flattened outputs of a model whose head gets the result of `at_head` for some positions."""
    thread = get_ident()

    def replace(head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not arguments or get_ident() != thread:  # another thread computes another micro-batch
            return None
        hidden_KLH, *others = arguments
        hidden_NH = hidden_KLH.flatten(0, 1).index_select(0, places_N)
        return (at_head(head, hidden_NH).unsqueeze(0), *others)

    head: nn.Module | None = cast(Any, model).get_output_embeddings()
    hook = None if head is None else head.register_forward_pre_hook(replace)
    try:
        return cast(nn.Module, model)(**inputs, use_cache=False).logits.flatten(0, 1)
    finally:
        if hook is not None:
            hook.remove()


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
