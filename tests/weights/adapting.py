"""Random weights with adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_loop.weights.adapted import AdaptedWeights, Factors

SIZE = 512
ADAPTED = ("layers.0.up", "layers.1.up")


def base_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (100, SIZE), ADAPTED[0]: (SIZE, SIZE), "norm": (SIZE,), ADAPTED[1]: (700, SIZE)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name == "norm" else torch.bfloat16)
        for name, shape in shapes.items()
    }


def adapted_of(
    base: dict[str, Tensor], *, version: int, base_id: str = "first", rank: int = 4
) -> AdaptedWeights:
    """Return the adapted weights of an update. The factors depend on the version."""
    generator = torch.Generator().manual_seed(version)
    factors = {
        name: Factors(
            torch.randn(len(base[name]), rank, generator=generator),
            torch.randn(rank, base[name].shape[1], generator=generator),
        )
        for name in ADAPTED
    }
    return AdaptedWeights(base, base_id=base_id, factors=factors)
