"""The model that is trained: loading it, and what it thinks of the tokens of a batch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.vision import VISION_MODELS, auto_model_class, media_features
from agent_loop.training.losses import token_log_probs
from agent_loop.training.micro_batches import MicroBatch


def load_policy(config: ModelConfig, *, path: str | Path | None = None) -> PreTrainedModel:
    """Loads the model and moves it to its device.

    Args:
        config: What to load, how precise, and where to.
        path: Takes the place of `config.path`, as when a run goes on from a checkpoint.

    Raises:
        ConfigError: There is no such model, or `transformers` cannot load it.
    """
    path = path or config.path
    if not path:
        raise ConfigError("model.path is not set; give a folder or hub name that transformers loads")
    try:
        loader = auto_model_class(path, trust_remote_code=config.trust_remote_code)
        model = loader.from_pretrained(path, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path is {str(path)!r}, which transformers cannot load as a causal language model: {reason}"
        ) from error
    return cast(PreTrainedModel, model.to(device_of(config)))


def device_of(config: ModelConfig) -> torch.device:
    """The device that `model.device` means on this machine.

    Raises:
        ConfigError: It names a GPU and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("model.device is 'cuda', but torch sees no GPU; set model.device=cpu or auto")
    return torch.device("cuda" if config.device != "cpu" and has_gpu else "cpu")


def make_exact(model: PreTrainedModel, *, gradient_checkpointing: bool) -> None:
    """Switches off all that makes two passes differ, such as dropout: engines sample without it."""
    model.eval()
    if gradient_checkpointing:
        older_name: Any = getattr(model, "gradient_checkpointing_enable", None)
        enable: Any = getattr(model, "activation_checkpointing_enable", older_name)
        enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # the switch of checkpointing; the modules in it stay as they are


def response_log_probs(
    model: PreTrainedModel, micro_batch: MicroBatch, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens at this temperature, and the entropy at each; both of shape [B, R].

    The first response token needs a token before it: prompts must not be empty.
    """
    width = micro_batch.mask_BR.shape[1]
    inputs: dict[str, Any] = {
        "attention_mask": micro_batch.attention_mask_BW,
        "position_ids": micro_batch.position_ids,
        "use_cache": False,
    }
    if any(micro_batch.attachments):
        inputs["inputs_embeds"] = _embed(model, micro_batch)
    else:
        inputs["input_ids"] = micro_batch.input_ids_BW
    forward = cast(nn.Module, model)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = width + 1
    logits_BTV: Tensor = forward(**inputs).logits
    return token_log_probs(
        logits_BTV[:, -width - 1 : -1], token_ids_BT=micro_batch.response_ids_BR, temperature=temperature
    )


def _embed(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Token embeddings with what the model makes of images in their places, [B, W, hidden]; gradients reach both.

    Raises:
        ConfigError: The model uses images in another way.
    """
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
