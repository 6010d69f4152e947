"""Owner of the `transformers` model: sets device, dtype and attention, and runs forwards with the model's own
attention."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.attention import ATTENTION_NAME
from agent_loop.servers.embedded.config import CONTEXT, EmbeddedConfig
from agent_loop.servers.embedded.model_types import refusal, rope_parameters
from agent_loop.servers.embedded.vision import VISION_MODELS
from agent_loop.types import IntArray

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""Names of the cache in the arguments and outputs of models."""


class ModelRunner:
    """Model of one embedded server, which owns it until `restore_attention`."""

    def __init__(self, model: Any, *, config: EmbeddedConfig) -> None:
        _check_model(model, config=config)
        self.model: Any = model
        self.device = _choose_device(config)
        if config.deterministic:
            use_deterministic_kernels(self.device)
        self.text_config = text_config_of(model.config)
        self._config = config
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        self.model.to(device=self.device, dtype=dtype).eval()
        if getattr(model.config, "rescale_every", 0):
            # RWKV would divide its weights in place at the first forward, but published weights are not divided.
            model.config.rescale_every = 0
        self._plain_attention: str = self.text_config._attn_implementation
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def vocab_size(self) -> int:
        """Number of token ids in the model's embedding."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        if weight is None:
            raise ConfigError(
                f"{type(self.model).__name__} has no single embedding of token ids; the embedded server supports text "
                "models only"
            )
        return int(weight.shape[0])

    @property
    def image_token_id(self) -> int | None:
        """Token id of the image placeholders; None if images are not supported for the model."""
        config = self.model.config
        return int(config.image_token_id) if config.model_type in VISION_MODELS else None

    @property
    def counts_in_3d(self) -> bool:
        """Whether the model's positions are time, height and width."""
        return any("mrope_section" in rope for rope in rope_parameters(self.text_config))

    @torch.inference_mode()
    def plain_logits(self, token_ids: Sequence[int] | IntArray, *, first: int = 0) -> Tensor:
        """Return the logits after each token from index `first` on, computed without a cache, [tokens - first,
        vocab]."""
        count = len(token_ids) - first
        output: Any = self.model(
            input_ids=self._input(token_ids), use_cache=False, **self._logits_option(count)
        )
        return output.logits[0, -count:]

    @torch.inference_mode()
    def cached_logits(self, token_ids: IntArray, *, cache: Any, num_logits: int = 1) -> tuple[Tensor, Any]:
        """Continue a sequence with the model's own cache. Return the last logits, [num_logits, vocab], and the new
        cache."""
        options: dict[str, Any] = {} if cache is None else dict([cache])
        output: Any = self.model(
            input_ids=self._input(token_ids), use_cache=True, **self._logits_option(num_logits), **options
        )
        found = next((name for name in CACHE_NAMES if getattr(output, name, None) is not None), None)
        if found is None:
            raise ConfigError("it returns no cache")
        return output.logits[0, -num_logits:], (found, getattr(output, found))

    def switch_attention(self, name: str) -> None:
        """Set the attention implementation of the language model. A vision tower keeps its own."""
        has_parts = self.text_config is not self.model.config
        try:
            self.model.set_attn_implementation({"text_config": name} if has_parts else name)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"its attention cannot be exchanged ({error})") from error

    def restore_attention(self) -> None:
        """Restore the model's original attention implementation."""
        if self.text_config._attn_implementation != self._plain_attention:
            self.switch_attention(self._plain_attention)

    def offload(self) -> None:
        """Move the weights to host memory, and release the free memory of the device."""
        if self.device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def load(self) -> None:
        """Move the weights to the device."""
        self.model.to(self.device)

    def _input(self, token_ids: Sequence[int] | IntArray) -> Tensor:
        return torch.as_tensor(token_ids, dtype=torch.long, device=self.device).unsqueeze(0)

    def _logits_option(self, count: int) -> dict[str, int]:
        return {"logits_to_keep": count} if self._keeps_logits else {}


def _check_model(model: Any, *, config: EmbeddedConfig) -> None:
    """Reject models that are known to be unsupported."""
    kind, longest = model.config.model_type, config.max_model_len
    model_config = text_config_of(model.config)
    if model_config._attn_implementation == ATTENTION_NAME:
        raise ConfigError(
            "this model already belongs to an embedded server; load it again or give a copy of the original model"
        )
    if getattr(model_config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder-decoder model; the embedded server supports decoders only")
    reason = refusal(model, length=longest)
    if reason is not None:
        raise ConfigError(f"{type(model).__name__} cannot be served: {reason}; use another model")
    own_limit = getattr(model_config, "max_position_embeddings", None)
    if isinstance(own_limit, int) and 0 < own_limit < longest:
        raise ConfigError(
            f"{CONTEXT} is {longest} tokens, but the model has {own_limit} positions; give at most {own_limit}"
        )
    for rope in rope_parameters(model_config):
        switch = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and switch is not None and longest > switch:
            raise ConfigError(
                f"{kind} changes its position frequencies for sequences over {switch} tokens (longrope), so that the "
                f"log-prob of a token depends on the tokens after it; {CONTEXT} is {longest} tokens, so give at most "
                f"{switch}"
            )


def text_config_of(model_config: Any) -> Any:
    """Return the configuration of the language model, which is the whole configuration of a text model."""
    return getattr(model_config, "text_config", None) or model_config


def use_deterministic_kernels(device: torch.device) -> None:
    """Use deterministic GPU kernels in this process. Kernels without a deterministic version raise an error.

    Does nothing on a CPU, whose kernels are always deterministic.
    """
    if device.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # (cuBLAS reads it once, at its first use)
        cast(Any, torch).use_deterministic_algorithms(True)


def _choose_device(config: EmbeddedConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda', but torch finds no GPU; set it to 'auto' or 'cpu'")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
