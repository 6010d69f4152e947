"""Model whose attention reads and writes the slots of a shared KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.attention import ATTENTION_NAME, AttentionContext, ShapeProbe
from agent_loop.servers.embedded.batch import StepBatch
from agent_loop.servers.embedded.cache import LayerShape
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.vision import PromptImages, media_features

PLAIN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Types of layers that store keys and values. The forward rejects a sliding window shorter than the context."""


class SlotModel:
    """Replaces the model's attention by attention over slots, and computes steps.

    Raises:
        ConfigError: Attention over slots does not support the model.
        Exception: The model's own code raised it.
    """

    def __init__(self, runner: ModelRunner, *, max_model_len: int) -> None:
        others = set(getattr(runner.text_config, "layer_types", None) or ()) - PLAIN_LAYER_TYPES
        if others:
            raise ConfigError(f"it has layers of type {', '.join(sorted(others))}")
        self._runner = runner
        runner.switch_attention(ATTENTION_NAME)
        try:
            self.layers = self._probe_layers(max_model_len)
        except Exception:
            runner.restore_attention()
            raise

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Compute a step and return the logits of its sampled slots, [rows, vocab]."""
        inputs_embeds = self._embed(batch) if batch.image_rows else None
        return self._forward(
            batch.token_ids if inputs_embeds is None else None,
            inputs_embeds=inputs_embeds,
            position_ids=batch.position_ids,
            context=batch.attention,
            logit_rows=batch.logit_rows,
        )

    @torch.inference_mode()
    def compute_image_features(self, images: PromptImages, *, first_token: int) -> None:
        """Compute the features of the images and videos that have placeholders from `first_token` on.

        Raises:
            FeaturesError: An image or video does not fit the model or its placeholders.
        """
        images.features.clear()
        for number, (attachment, indices) in enumerate(
            zip(images.attachments, images.placeholder_indices, strict=True)
        ):
            if indices[-1] >= first_token:
                images.features[number] = media_features(
                    self._runner.model, attachment, num_placeholders=len(indices)
                )

    def _embed(self, batch: StepBatch) -> Tensor:
        """Return the embeddings of a step's tokens, with image features for placeholders, [1, tokens, hidden]."""
        embeds: Tensor = self._runner.model.get_input_embeddings()(batch.token_ids.clamp(min=0))
        for rows, features in batch.image_rows:
            embeds[0, rows] = features
        return embeds

    def _forward(
        self,
        token_ids: Tensor | None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor,
        context: AttentionContext,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        inputs = {"input_ids": token_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        output: Any = self._runner.model(
            **inputs,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=0 if logit_rows is None else logit_rows,
            attention_context=context,
        )
        return output.logits[0]

    @torch.inference_mode()
    def _probe_layers(self, max_model_len: int) -> list[LayerShape]:
        probe = ShapeProbe(max_model_len=max_model_len)
        two_tokens = torch.arange(2, device=self._runner.device).unsqueeze(0)
        self._forward(two_tokens, position_ids=two_tokens, context=probe)
        num_layers = int(self._runner.text_config.num_hidden_layers)
        if sorted(probe.layers) != list(range(num_layers)):
            raise ConfigError(
                f"only {len(probe.layers)} of its {num_layers} layers use a replaceable attention implementation"
            )
        return [probe.layers[layer] for layer in range(num_layers)]
