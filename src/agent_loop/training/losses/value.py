"""Loss of the critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.training.losses.aggregation import Aggregation


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Loss of the critic and its metric; both scalars."""

    loss: Tensor
    """With gradient."""
    clip_fraction: Tensor
    """Share of tokens whose gradient the clip removed."""


def value_loss(
    values_BT: Tensor,
    *,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    clip_range: float | None,
    reduce: Aggregation,
) -> ValueLoss:
    """Return half the squared error, or that of the clipped value if it is larger (arXiv 2005.12729, section 3).

    `max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2) / 2`

    Args:
        values_BT: Values of the critic that is trained, with gradient.
        old_values_BT: Values before the update.
        returns_BT: Returns to predict.
        mask_BT: 1 for tokens to train on.
        clip_range: Largest change of a value; None is no bound.
        reduce: Aggregation of the tokens.
    """
    is_trained_BT = mask_BT.bool()
    values_BT, old_values_BT, returns_BT = (
        torch.where(is_trained_BT, part_BT, 0.0) for part_BT in (values_BT, old_values_BT, returns_BT)
    )
    plain_BT = (values_BT - returns_BT).square() / 2
    worse_BT, is_clipped_BT = plain_BT, torch.zeros_like(is_trained_BT)
    if clip_range is not None:
        near_BT = torch.clamp(values_BT, old_values_BT - clip_range, old_values_BT + clip_range)
        clipped_BT = (near_BT - returns_BT).square() / 2
        worse_BT, is_clipped_BT = torch.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT
    return ValueLoss(
        loss=reduce(worse_BT, mask_BT=mask_BT),
        clip_fraction=reduce(is_clipped_BT.to(values_BT.dtype), mask_BT=mask_BT),
    )
