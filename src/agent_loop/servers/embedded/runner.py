"""Owns the `transformers` model: switches its attention to the slots, and runs steps through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.attention import ATTENTION_NAME, AttentionContext, ShapeProbe
from agent_loop.servers.embedded.batch import StepBatch
from agent_loop.servers.embedded.cache import KVCache, LayerShape
from agent_loop.servers.embedded.config import CONTEXT, EmbeddedConfig
from agent_loop.servers.embedded.vision import VISION_MODELS, PromptImages, media_features

PLAIN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layers that keep keys and values. A sliding window shorter than the sequences is refused in the forward."""


class ModelRunner:
    """The model of one embedded server, from now on the server's own.

    Raises:
        ConfigError: The model is of a kind that slot attention does not compute.
    """

    def __init__(self, model: Any, *, config: EmbeddedConfig) -> None:
        check_model_config(model.config, config=config)
        self.model: Any = model
        self._config = config
        self._device = _choose_device(config)
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        self.model.to(device=self._device, dtype=dtype).eval()
        self._text_config = text_config_of(model.config)
        self._plain_attention: str = self._text_config._attn_implementation
        self._switch_attention(ATTENTION_NAME)
        try:
            self._layers = self._probe_layers()
        except ConfigError:
            self.hand_back()
            raise

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def image_token_id(self) -> int | None:
        """Of the placeholders of images; None if the model takes none here."""
        config = self.model.config
        return int(config.image_token_id) if config.model_type in VISION_MODELS else None

    @property
    def counts_in_3d(self) -> bool:
        """The model's positions are in time, height and width."""
        return any("mrope_section" in rope for rope in _rope_parameters(self._text_config))

    @property
    def dtype(self) -> torch.dtype:
        return self._layers[0].dtype

    def allocate_cache(self) -> KVCache:
        return KVCache(
            self._layers, num_slots=self._config.max_slots, max_model_len=self._config.max_model_len
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Returns the logits of the rows that are sampled, [rows, vocab]."""
        inputs_embeds = self._embed(batch) if batch.image_rows else None
        return self._forward(
            batch.token_ids if inputs_embeds is None else None,
            inputs_embeds=inputs_embeds,
            position_ids=batch.position_ids,
            context=batch.attention,
            logit_rows=batch.logit_rows,
        )

    @torch.inference_mode()
    def read_images(self, images: PromptImages, *, first_token: int) -> None:
        """Computes the features of the images and videos with tokens from `first_token` on.

        Raises:
            FeaturesError: One does not fit the model or its placeholders.
        """
        images.features.clear()
        for number, (attachment, places) in enumerate(zip(images.attachments, images.places, strict=True)):
            if places[-1] >= first_token:
                images.features[number] = media_features(self.model, attachment, num_placeholders=len(places))

    @torch.inference_mode()
    def plain_log_probs(self, token_ids: Sequence[int]) -> Tensor:
        """The next-token log-probs after each token, by the model's own attention. Shape [tokens, vocab]."""
        self._switch_attention(self._plain_attention)
        try:
            ids = torch.tensor([token_ids], device=self._device)
            output: Any = self.model(input_ids=ids, use_cache=False)
        finally:
            self._switch_attention(ATTENTION_NAME)
        return output.logits[0].float().log_softmax(dim=-1)

    def offload(self) -> None:
        """Moves the weights to host memory, and gives the device's free memory back."""
        if self._device.type == "cuda":
            if self._config.offload_weights_on_sleep:
                self.model.to("cpu")
            torch.cuda.empty_cache()

    def load(self) -> None:
        """Moves the weights to the device."""
        self.model.to(self._device)

    def hand_back(self) -> None:
        """Gives the model its own attention again, for whoever uses it after the server."""
        self._switch_attention(self._plain_attention)

    def _embed(self, batch: StepBatch) -> Tensor:
        """The embeddings of a step's tokens, with features where images stand. Shape [1, tokens, hidden]."""
        embeds: Tensor = self.model.get_input_embeddings()(batch.token_ids.clamp(min=0))
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
        output: Any = self.model(
            **inputs,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=0 if logit_rows is None else logit_rows,
            attention_context=context,
        )
        return output.logits[0]

    @torch.inference_mode()
    def _probe_layers(self) -> list[LayerShape]:
        probe = ShapeProbe(max_model_len=self._config.max_model_len)
        two_tokens = torch.arange(2, device=self._device).unsqueeze(0)
        self._forward(two_tokens, position_ids=two_tokens, context=probe)
        num_layers = int(self._text_config.num_hidden_layers)
        if sorted(probe.layers) != list(range(num_layers)):
            raise ConfigError(
                f"{type(self.model).__name__} has {num_layers} layers, but only {len(probe.layers)} of them call "
                "exchangeable attention; the embedded server needs all of them to: use another server"
            )
        return [probe.layers[layer] for layer in range(num_layers)]

    def _switch_attention(self, name: str) -> None:
        """A vision tower keeps its own."""
        has_parts = self._text_config is not self.model.config
        try:
            self.model.set_attn_implementation({"text_config": name} if has_parts else name)
        except ValueError as error:
            raise ConfigError(
                f"{type(self.model).__name__} does not let its attention be exchanged ({error}); use another server"
            ) from error


def check_model_config(model_config: Any, *, config: EmbeddedConfig) -> None:
    """Refuses by name what cannot work; the rest is found out by running the model.

    Raises:
        ConfigError: See the message.
    """
    kind, longest = model_config.model_type, config.max_model_len
    model_config = text_config_of(model_config)
    if model_config._attn_implementation == ATTENTION_NAME:
        raise ConfigError(
            "this model already belongs to an embedded server; load it again or give a copy of the original"
        )
    if getattr(model_config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder-decoder model; the embedded server runs decoders only")
    others = set(getattr(model_config, "layer_types", None) or ()) - PLAIN_LAYER_TYPES
    if others:
        raise ConfigError(
            f"{kind} has layers of type {', '.join(sorted(others))}; the embedded server computes full attention "
            "only: use another server"
        )
    own_limit = getattr(model_config, "max_position_embeddings", None)
    if own_limit is not None and longest > own_limit:
        raise ConfigError(
            f"{CONTEXT} is {longest} tokens, but the model ends at {own_limit} positions; give at most {own_limit}"
        )
    for rope in _rope_parameters(model_config):
        switch = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and switch is not None and longest > switch:
            raise ConfigError(
                f"{kind} changes its position frequencies for sequences over {switch} tokens (longrope), which "
                f"cannot be batched with shorter ones; {CONTEXT} is {longest} tokens, so give at most {switch}"
            )


def text_config_of(model_config: Any) -> Any:
    """The part that describes the language model; the whole where there are no parts."""
    return getattr(model_config, "text_config", None) or model_config


def _rope_parameters(model_config: Any) -> list[Mapping[str, Any]]:
    """One mapping, or one per layer type."""
    rope: Mapping[str, Any] = getattr(model_config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, Mapping))]


def _choose_device(config: EmbeddedConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda', but torch finds no GPU; set it to 'auto' or 'cpu'")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
