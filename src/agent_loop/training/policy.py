"""The policy: loading its model, and its log-probs of the tokens of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.model_types import logit_scaling
from agent_loop.servers.embedded.vision import auto_model_class
from agent_loop.training.adapters import add_adapters, is_adapter_folder, is_low_rank, load_adapters
from agent_loop.training.forward import SampledTokens, apply_at_head, outputs_at, sampled_tokens
from agent_loop.training.losses.logprobs import (
    LinearHead,
    LogitTransform,
    TokenLogProbs,
    blockwise_logprobs,
    token_logprobs,
)
from agent_loop.training.master_weights import keep_layout, quantized_loading
from agent_loop.training.micro_batches import MicroBatch

ATTENTION_PARTS = ("attention", "flash_attn")
"""Parts of the names of operations that compute attention."""


def load_policy(config: ModelConfig, *, path: str | Path | None = None, seed: int = 0) -> PreTrainedModel:
    """Load the model, move it to its device, and add adapters if `config.lora_rank` is set.

    Weights are float32, but for those in 4 bits if `config.base_bits` is set.

    Args:
        config: Settings of the model.
        path: Path to load instead of `config.path`, for example from a checkpoint. With adapters, it holds the
            adapters, and the model is loaded from `config.path`.
        seed: Seed of new adapters.
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


@dataclass(frozen=True, slots=True)
class ResponseLogProbs:
    """Log-probs and entropies at the sampled tokens of a micro-batch; 0 elsewhere. All have gradients."""

    sampled_BR: Tensor
    entropy_BR: Tensor
    """In nats; without a gradient if `entropy_has_gradient` was False."""
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

    Prompts must not be empty, because the first response token needs a token before it.

    Args:
        model: The policy or the reference.
        micro_batch: Rows; the tokens at which `mask_BR` is 1 are computed.
        temperature: Divisor of the logits.
        entropy_has_gradient: False computes the entropy for metrics only.
        candidate_ids_BRK: Token ids whose log-probs are computed before each response token; ids at other tokens are
            ignored.
    """
    tokens = sampled_tokens(model, micro_batch)
    options: dict[str, Any] = {
        "token_ids_M": tokens.token_ids_M,
        "place_M": tokens.place_M,
        "temperature": temperature,
        "entropy_has_gradient": entropy_has_gradient,
        "candidate_ids_MK": None if candidate_ids_BRK is None else candidate_ids_BRK[tokens.mask_BR.bool()],
    }
    found = _blockwise(model, tokens, options)
    if found is None:
        found = token_logprobs(outputs_at(model, tokens.before_N, tokens.inputs), **options)
    return ResponseLogProbs(
        tokens.spread(found.sampled_M),
        tokens.spread(found.entropy_M),
        None if found.candidates_MK is None else tokens.spread(found.candidates_MK),
    )


def _blockwise(
    model: PreTrainedModel, tokens: SampledTokens, options: dict[str, Any]
) -> TokenLogProbs | None:
    """Return log-probs that are computed in blocks of the vocabulary; None if the model's head is not known."""
    scaling, head = logit_scaling(model), cast(Any, model).get_output_embeddings()
    if scaling is None or not _is_linear(head):
        return None
    transform = LogitTransform(*scaling)

    def logprobs_of(head: nn.Module, hidden_NH: Tensor) -> TokenLogProbs:
        return blockwise_logprobs(_linear_head(head, hidden_NH, transform=transform), **options)

    return apply_at_head(model, tokens.before_N, tokens.inputs, logprobs_of)


def _linear_head(head: nn.Module, hidden_NH: Tensor, *, transform: LogitTransform) -> LinearHead:
    """Return the head of a model as products of matrices."""
    base: Any = getattr(head, "base_layer", head)
    products = [(hidden_NH, base.weight)]
    if base is not head:
        products += _adapter_products(head, hidden_NH)
    inputs, weights = zip(*products, strict=True)
    return LinearHead(inputs, weights, base.bias, transform)


def _is_linear(head: nn.Module) -> bool:
    """Return whether this is a linear layer, with or without low-rank adapters."""
    base: Any = getattr(head, "base_layer", head)
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        return False
    return base is head or is_low_rank(head)


def _adapter_products(layer: Any, hidden_NH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for adapter in () if layer.disable_adapters else layer.active_adapters:
        if adapter in layer.lora_A:
            down_NR = functional.linear(hidden_NH, layer.lora_A[adapter].weight)
            yield down_NR * layer.scaling[adapter], layer.lora_B[adapter].weight
