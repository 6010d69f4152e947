"""Measures how far rounding alone moves a model's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Difference of log-probs, in nats, that needs no explanation, by type."""
TOLERANCE_OF_SHORT_TYPES = 0.25
LARGEST_TOLERANCE = 5e-3
"""A difference of float32 log-probs that is no rounding, however sensitive the model."""
MARGIN = 16.0
"""Two ways of computing differ in many roundings; the disturbance is one per embedding."""


def rounding_allowance(
    model: Any, *, token_ids: Sequence[int], plain_logits: Callable[[Sequence[int]], Tensor]
) -> float:
    """Return the largest difference of log-probs, in nats, that two exact ways of computing may have.

    That is 1e-4 in float32, or more for a model that magnifies rounding.

    Args:
        model: Model of `transformers`.
        token_ids: Sequence to measure on.
        plain_logits: The model's forward of one sequence, [tokens, vocab].
    """
    if model.dtype not in TOLERANCE:
        return TOLERANCE_OF_SHORT_TYPES
    moved_by = moved_by_rounding(model, lambda: plain_logits(token_ids).log_softmax(dim=-1))
    return min(max(TOLERANCE[model.dtype], MARGIN * moved_by), LARGEST_TOLERANCE)


def moved_by_rounding(model: Any, compute: Callable[[], Tensor]) -> float:
    """Return how far the outputs of a model move when its embeddings are disturbed by one unit in the last place.

    Args:
        model: Model of `transformers`.
        compute: Runs the model.
    """
    plain = compute()
    with _disturbed(model):
        disturbed = compute()
    return float((plain - disturbed).nan_to_num(0.0).abs().max())


@contextmanager
def _disturbed(model: Any) -> Generator[None]:
    def disturb(module: Any, inputs: Any, output: Tensor) -> Tensor:
        signs = torch.ones_like(output)
        signs.view(-1)[::2] = -1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    handle = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        yield
    finally:
        handle.remove()
