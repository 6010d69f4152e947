"""Measures how much rounding changes a model's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Difference of log-probs, in nats, that is always tolerated, by dtype."""
TOLERANCE_OF_SHORT_TYPES = 0.25
LARGEST_TOLERANCE = 5e-3
"""Upper bound of the tolerance for float32. A larger difference is not rounding, however sensitive the model is."""
MARGIN = 16.0
"""Factor on the measured sensitivity: two backends differ in many roundings, the perturbation is one per embedding."""


def rounding_tolerance(
    model: Any, *, token_ids: Sequence[int], plain_logits: Callable[[Sequence[int]], Tensor]
) -> float:
    """Return the largest difference of log-probs, in nats, between two exact computations of a model.

    The result is 1e-4 in float32, and larger for a model that amplifies rounding.

    Args:
        model: Model of `transformers`.
        token_ids: Sequence to measure on.
        plain_logits: Computes the model's forward of one sequence, [tokens, vocab].
    """
    if model.dtype not in TOLERANCE:
        return TOLERANCE_OF_SHORT_TYPES
    sensitivity = rounding_sensitivity(model, lambda: plain_logits(token_ids).log_softmax(dim=-1))
    return min(max(TOLERANCE[model.dtype], MARGIN * sensitivity), LARGEST_TOLERANCE)


def rounding_sensitivity(model: Any, compute: Callable[[], Tensor]) -> float:
    """Return the largest change of a model's outputs if its embeddings change by one unit in the last place.

    Args:
        model: Model of `transformers`.
        compute: Runs the model and returns the outputs.
    """
    plain = compute()
    with _perturbed_embeddings(model):
        perturbed = compute()
    return float((plain - perturbed).nan_to_num(0.0).abs().max())


@contextmanager
def _perturbed_embeddings(model: Any) -> Generator[None]:
    def perturb(module: Any, inputs: Any, output: Tensor) -> Tensor:
        signs = torch.ones_like(output)
        signs.view(-1)[::2] = -1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    handle = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        yield
    finally:
        handle.remove()
