"""What an update of the policy is measured against, and pulled to. B rows of a batch, R response width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import CorrectionConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.losses import correct


@dataclass(frozen=True, slots=True)
class PastLogProbs:
    """What the new log-probs are held against; rows and columns of the whole batch, 0 in rows that were not asked."""

    old_BR: Tensor
    """Of the policy that sampled."""
    rollout_BR: Tensor | None
    """What the servers gave; None where they gave none."""
    reference_BR: Tensor | None
    """Of the policy at the start of the run; None where no reference is kept."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What an update pulls the policy to; rows and columns of the whole batch."""

    advantages_BR: Tensor
    weights_BR: Tensor | None
    """How much each token's loss counts; None is the same for all."""
    past: PastLogProbs


def importance(
    batch: RolloutBatch, *, rows: Tensor, past: PastLogProbs, config: CorrectionConfig
) -> tuple[Tensor | None, dict[str, float]]:
    """The weights of tokens for rollout and training being apart, [B, R], and metrics; None where all count the same.

    Raises:
        DataError: The servers gave no log-probs to compare with.
    """
    if config.kind == "none":
        return None, {}
    if past.rollout_BR is None:
        raise DataError(
            "the batch has no rollout_log_probs, which actor.correction compares with; let the servers give "
            "log-probs, or set actor.correction.kind=none"
        )
    is_trained_B = torch.zeros(len(batch), dtype=torch.bool).index_fill(0, rows, True)
    mask_BR = batch["response_mask"] * is_trained_B[:, None]
    correction = correct(past.old_BR, rollout_logprobs_BT=past.rollout_BR, mask_BT=mask_BR, config=config)
    return correction.weights_BT, {
        names.TRUNCATED_SHARE: correction.truncated_share,
        names.MASKED_SHARE: correction.masked_share,
        names.CORRECTION_WEIGHT_MEAN: float(correction.weights_BT.sum() / mask_BR.sum()),
    }
