"""Targets of an update of the policy. B rows of a batch, R response width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import CorrectionConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.branches import rollouts_of_rows
from agent_loop.training.distillation import TeacherTargets
from agent_loop.training.losses import correct, effective_share, weight_sums


@dataclass(frozen=True, slots=True)
class PastLogProbs:
    """Log-probs that an update compares with. Rows and columns of the whole batch; 0 in rows that are not updated."""

    old_BR: Tensor
    """Log-probs of the policy that sampled."""
    rollout_BR: Tensor | None
    """Log-probs that the servers returned; None if they returned none."""
    reference_BR: Tensor | None
    """Log-probs of the policy at the start of the run; None without a reference model."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of an update. Rows and columns of the whole batch."""

    advantages_BR: Tensor
    weights_BR: Tensor | None
    """Weight of each token's loss; None is 1."""
    past: PastLogProbs
    teachers: TeacherTargets | None = None
    """Scores of teachers, as a term of the loss; None without such a term."""


def importance(
    batch: RolloutBatch, *, rows: Tensor, past: PastLogProbs, config: CorrectionConfig
) -> tuple[Tensor | None, dict[str, float]]:
    """Return importance weights of tokens, [B, R], and metrics; None as weights if `config.kind` is `none`.

    Raises:
        DataError: The servers returned no log-probs.
    """
    if config.kind == "none":
        return None, {}
    if past.rollout_BR is None:
        raise DataError(
            "the batch has no rollout_log_probs, which actor.correction compares with; let the servers return "
            "log-probs, or set actor.correction.kind=none"
        )
    is_trained_B = torch.zeros(len(batch), dtype=torch.bool).index_fill(0, rows, True)
    mask_BR = batch["response_mask"] * is_trained_B[:, None]
    correction = correct(
        past.old_BR,
        rollout_logprobs_BT=past.rollout_BR,
        mask_BT=mask_BR,
        config=config,
        rollouts_B=rollouts_of_rows(batch),
    )
    return correction.weights_BT, {
        names.TRUNCATED_SHARE: correction.truncated_share,
        names.MASKED_SHARE: correction.masked_share,
        names.CORRECTION_WEIGHT_MEAN: float(correction.weights_BT.sum() / mask_BR.sum()),
        names.CORRECTION_ESS: effective_share(weight_sums(correction.weights_BT.double(), mask_BT=mask_BR)),
    }
