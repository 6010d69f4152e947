"""Loading of the policy and of the reference policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_loop.config import Config, ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.vision import auto_model_class
from agent_loop.training.adapters import add_adapters, is_adapter_folder, load_adapters
from agent_loop.training.master_weights import keep_layout, quantized_loading

MAX_NAMED = 3
"""Number of tokens that an error names."""
ATTENTION_PARTS = ("attention", "flash_attn")
"""Parts of the names of operations that compute attention."""


def load_policy(config: ModelConfig, *, path: str | Path | None = None, seed: int = 0) -> PreTrainedModel:
    """Load the model, move it to its device, and add adapters if `config.lora_rank` is set.

    Weights are float32, but for those in 4 bits if `config.base_bits` is set. `path` is loaded instead of
    `config.path`, for example from a checkpoint. With adapters, it holds the adapters, and the model is loaded from
    `config.path`. `seed` is that of new adapters.
    """
    if path is not None and is_adapter_folder(path) != bool(config.lora_rank):
        what = "no adapters" if config.lora_rank else "adapters"
        raise ConfigError(
            f"model.lora_rank is {config.lora_rank}, but {path} holds {what}; set it to the value of the run that "
            f"wrote {path}"
        )
    model = load_base(config, path=config.path if path is None or config.lora_rank else path)
    if config.lora_rank and path is not None:
        load_adapters(model, config=config, folder=Path(path))
    elif config.lora_rank:
        add_adapters(model, config=config, seed=seed)
    return model if config.base_bits else cast(Any, model).to(device_of(config))


def load_base(config: ModelConfig, *, path: str | Path) -> PreTrainedModel:
    """Load a model without adapters, in float32 or with `config.base_bits`."""
    options: dict[str, Any] = {}
    if config.base_bits:
        options = quantized_loading(device=device_of(config), dtype=compute_dtype(config))
    if not path:
        raise ConfigError("model.path is not set; give a folder or hub name that transformers loads")
    try:
        loader = auto_model_class(path, trust_remote_code=config.trust_remote_code)
        model = loader.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **options
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _cannot_load(path, error) from error
    keep_layout(model)
    return model


def _cannot_load(path: str | Path, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0]
    return ConfigError(
        f"model.path is {str(path)!r}, which transformers cannot load as a causal language model: {reason}"
    )


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype that the model computes in, which is also the dtype of the weights in the servers."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    try:
        found = cast(Any, AutoConfig).from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _cannot_load(config.path, error) from error
    dtype = found.dtype or found.get_text_config().dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"model.dtype is auto, but {config.path!r} has {dtype}, which cannot be trained in; set "
            "model.dtype=bfloat16 or float32"
        )
    return dtype


def device_of(config: ModelConfig) -> torch.device:
    """Return the device that `model.device` selects on this machine."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("model.device is 'cuda', but torch sees no GPU; set model.device=cpu or auto")
    return torch.device("cuda" if config.device != "cpu" and has_gpu else "cpu")


def make_exact(model: PreTrainedModel, *, gradient_checkpointing: bool | Literal["selective"]) -> None:
    """Switch off everything that makes two passes differ, such as dropout, because engines sample without it."""
    model.eval()
    if getattr(model.config, "rescale_every", 0):
        cast(
            Any, model.config
        ).rescale_every = 0  # RWKV would divide its weights in place at the first forward
    if gradient_checkpointing:
        older_name: Any = getattr(model, "gradient_checkpointing_enable", None)
        enable: Any = getattr(model, "activation_checkpointing_enable", older_name)
        keep = {"context_fn": _keep_attention} if gradient_checkpointing == "selective" else {}
        enable({"use_reentrant": False, **keep})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # enables checkpointing; the modules inside are not changed


def _keep_attention() -> Any:
    """Return the contexts of a checkpoint that keeps the outputs of attention."""

    def policy(context: object, operation: Any, *arguments: object, **options: object) -> CheckpointPolicy:
        is_attention = any(part in operation.name() for part in ATTENTION_PARTS)
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    return cast(Any, checkpoint).create_selective_checkpoint_contexts(policy)


def load_vocabulary(path: str, config: Config) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer, by their texts."""
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{path!r} has no tokenizer that transformers loads: {reason}") from error
    return dict(tokenizer.get_vocab())


def refuse_other_vocabulary(own: Mapping[str, int], other: Mapping[str, int], *, key: str, path: str) -> None:
    """Raise an error unless two vocabularies give each token the same id."""
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if not differing:
        return
    named = ", ".join(map(repr, differing[:MAX_NAMED]))
    raise ConfigError(
        f"{key} is {path!r}, whose vocabulary differs from the policy's in {len(differing)} tokens ({named}, ...), so "
        "its log-probs are those of other texts; give a model with the same tokenizer"
    )


def load_reference(
    config: Config, *, policy: PreTrainedModel | None = None, device: str | None = None
) -> PreTrainedModel | None:
    """Load the reference policy of the KL penalties; None if no penalty has a weight.

    `placement` may give it the CPU, or a device of its own: the second that this process sees. `device` stands in for
    `model.device`. If the policy has adapters and the reference is the policy at the start of the run, the result is
    the policy: without its adapters, it is the reference.
    """
    if not (config.actor.kl_loss_coef or config.algorithm.kl_reward_coef):
        return None
    path = config.actor.reference_path
    if policy is not None and config.model.lora_rank and path is None:
        return policy
    if path is not None:
        _check_vocabulary(config, path)
    placement = config.placement
    has_own_device = (
        placement.split is not None and placement.split.reference and torch.cuda.device_count() > 1
    )
    if placement.reference == "cpu" or has_own_device:
        device = "cpu"
    changes = {
        "lora_rank": 0,
        "base_bits": None,
        "path": path or config.model.path,
        "device": device or config.model.device,
    }
    model = load_policy(config.model.model_copy(update=changes))
    return cast(Any, model).to("cuda:1") if has_own_device else model


def _check_vocabulary(config: Config, path: str) -> None:
    """Compare the tokenizers. A model without a tokenizer is compared by its loader, which needs as many ids."""
    try:
        own = load_vocabulary(config.model.tokenizer_path or config.model.path, config)
        other = load_vocabulary(path, config)
    except ConfigError:
        return
    refuse_other_vocabulary(own, other, key="actor.reference_path", path=path)
