"""What a model says just before each token of the responses: the one place where training calls models.

B rows, R response width, W prompt and response, M response tokens, X outputs of the model per token.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.vision import VISION_MODELS, media_features
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.packing import pack


@dataclass(frozen=True, slots=True)
class Predictions:
    """The outputs before each response token, [B, R, X]; of packed rows [M, X], without padding."""

    outputs: Tensor
    token_ids: Tensor
    """The response tokens: the shape of `outputs` without X."""
    is_response_BR: Tensor
    """Bool: where there is a response token."""

    def spread(self, values: Tensor) -> Tensor:
        """One value for each token, in rows and columns, [B, R]; 0 where packed rows have no token."""
        if values.dim() > 1:
            return values
        return values.new_zeros(self.is_response_BR.shape).masked_scatter(self.is_response_BR, values)


def predict_response(model: PreTrainedModel, micro_batch: MicroBatch) -> Predictions:
    """Runs the model over a micro-batch.

    The first response token needs a token before it: prompts must not be empty.

    Raises:
        ConfigError: There are images, which a model of this kind is not trained with.
    """
    is_response_BR, response_ids_BR = micro_batch.is_response_BR, micro_batch.response_ids_BR
    if micro_batch.lines:
        packed = pack(micro_batch)
        outputs_KLX = _call(model, input_ids=packed.input_ids_KL, position_ids=packed.position_ids_KL)
        outputs_MX = outputs_KLX.flatten(0, 1)[packed.before_M]
        return Predictions(outputs_MX, response_ids_BR[is_response_BR], is_response_BR)
    width = micro_batch.mask_BR.shape[1]
    inputs: dict[str, Any] = {
        "attention_mask": micro_batch.attention_mask_BW,
        "position_ids": micro_batch.position_ids,
    }
    if any(micro_batch.attachments):
        inputs["inputs_embeds"] = _embed(model, micro_batch)
    else:
        inputs["input_ids"] = micro_batch.input_ids_BW
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = width + 1
    outputs_BTX = _call(model, **inputs)
    return Predictions(outputs_BTX[:, -width - 1 : -1], response_ids_BR, is_response_BR)


def _call(model: PreTrainedModel, **inputs: Any) -> Tensor:
    return cast(nn.Module, model)(**inputs, use_cache=False).logits


def _embed(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Token embeddings with what the model makes of images in their places, [B, W, hidden]; gradients reach both."""
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
