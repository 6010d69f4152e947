"""The head of a language model, and what the model does with the logits after its head.

Most models return the outputs of a linear head, some multiply them or cap them. The log-probs of such models are
computed in blocks of the vocabulary, which needs little memory. A test with made-up outputs of the head finds the
function, so that a model with another function is recognised.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import get_ident
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from agent_loop.training.adapted_model import is_low_rank
from agent_loop.training.forward import outputs_at
from agent_loop.training.losses import LinearHead, LogitTransform

LARGEST_OUTPUT = 1e3
"""Largest output of a head in the test."""
TOLERANCE = 4.0
"""Accepted difference of logits, in units of the precision of their dtype."""
SETTING_PARTS = ("logit", "multiplier", "softcap", "soft_cap")
"""Parts of the names of settings that may hold the factor or the cap."""

logger = logging.getLogger(__name__)
_known: WeakKeyDictionary[PreTrainedModel, LogitTransform | None] = WeakKeyDictionary()


def logit_transform(model: PreTrainedModel, inputs: dict[str, Tensor]) -> LogitTransform | None:
    """Return what the model does with the outputs of its head; None if it is not a factor and a soft cap.

    The first call for a model runs a forward pass. All ranks of a process group must make it together.

    Args:
        model: Language model.
        inputs: Arguments of the model.
    """
    if model not in _known:
        _known[model] = _find_transform(model, inputs)
        if _known[model] is None:
            logger.warning(
                "%s: the logits of all tokens of a micro-batch are in memory at once, because what the model does "
                "with the outputs of its head is not known; lower max_tokens_per_micro_batch if memory is short",
                type(model).__name__,
            )
    return _known[model]


def linear_head(head: nn.Module, hidden_NH: Tensor, *, transform: LogitTransform) -> LinearHead:
    """Return the head of a model as products of matrices.

    Args:
        head: Head of a model for which `logit_transform` returned a transform.
        hidden_NH: Input of the head.
        transform: What the model does with the outputs of the head.
    """
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


@torch.no_grad()
def _find_transform(model: PreTrainedModel, inputs: dict[str, Tensor]) -> LogitTransform | None:
    """Replace the outputs of the head by numbers of all sizes, and compare the logits with each possible function."""
    head: nn.Module | None = cast(Any, model).get_output_embeddings()
    if head is None or not _is_linear(head):
        return None
    given: list[Tensor] = []
    thread = get_ident()

    def replace(module: nn.Module, arguments: object, outputs: Tensor) -> Tensor | None:
        if get_ident() != thread:
            return None
        size = outputs.numel()
        exponents = torch.linspace(-3, 0, size, device=outputs.device)
        signs = 1 - 2 * (torch.arange(size, device=outputs.device) % 2)
        given.append((signs * LARGEST_OUTPUT * 10.0**exponents).to(outputs.dtype).view(outputs.shape))
        return given[-1]

    places_N = torch.zeros(2, dtype=torch.long, device=model.device)
    hook = head.register_forward_hook(replace)
    try:
        found = outputs_at(model, places_N, inputs)
    finally:
        hook.remove()
    if len(given) != 1 or given[0].flatten(0, -2).shape != found.shape:
        return None
    return _fitting(_candidates(model, found.dtype), given[0].flatten(0, -2), found)


def _fitting(
    candidates: Iterator[LogitTransform], outputs_NV: Tensor, logits_NV: Tensor
) -> LogitTransform | None:
    """Return the candidate whose logits are closest, the first of equals; None if none is close enough."""
    best, smallest = None, TOLERANCE * max(torch.finfo(t.dtype).eps for t in (outputs_NV, logits_NV))
    for candidate in candidates:
        difference = float(((candidate(outputs_NV) - logits_NV).abs() / logits_NV.abs()).max())
        if difference < smallest:
            best, smallest = candidate, difference
    return best


def _candidates(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[LogitTransform]:
    """Yield the possible functions, the simplest first. Factors and caps are settings of the model."""
    values: list[float] = []
    config: Any = model.config
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            if is_number and any(part in name for part in SETTING_PARTS):
                values.append(float(value))
    for soft_cap in (None, *values):
        for factor in (1.0, *values, *(1 / value for value in values)):
            yield LogitTransform(factor, soft_cap, dtype)
