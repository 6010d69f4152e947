"""Cross-entropy of observations as an auxiliary loss: the policy also learns what its actions lead to.

B rows of a batch or of a micro-batch, R response width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.losses import aggregate, loss_denominator
from agent_loop.training.micro_batches import MicroBatch


@dataclass(frozen=True, slots=True)
class ObservationLoss:
    """Mean cross-entropy of the observations of a mini-batch, in nats (ECHO, arXiv 2605.24517).

    Observations are the response tokens that no model sampled: the replies of tools and interactions, with what the
    chat template writes around them. The log-probs are those of the policy loss, from the same forward pass and at the
    temperature of the rollout.
    """

    coefficient: float
    """Factor of the mean in the loss of the actor."""
    is_observed_BR: Tensor
    """int64: 1 at observations, for the whole batch."""
    num_tokens: float
    """Number of observations in the mini-batch, at least 1."""

    @classmethod
    def of(cls, batch: RolloutBatch, *, rows: Tensor, coefficient: float) -> ObservationLoss | None:
        """Return the loss of a mini-batch; None if the coefficient is 0.

        Args:
            batch: Batch that `assemble` returned.
            rows: Indices of the rows of the mini-batch.
            coefficient: Factor of the mean in the loss of the actor.
        """
        if not coefficient:
            return None
        is_response_BR = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
        is_observed_BR = (is_response_BR & (batch["weight_versions"] < 0)).long()
        num_tokens = loss_denominator(is_observed_BR[rows], mode="token-mean")
        return cls(coefficient, is_observed_BR, num_tokens)

    def widened(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch whose mask holds the observations too, so that their log-probs are computed."""
        return replace(micro_batch, mask_BR=micro_batch.mask_BR | self._observed(micro_batch))

    def __call__(self, logprobs_BR: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return this micro-batch's part of the mean, without the coefficient."""
        return aggregate(
            -logprobs_BR,
            mask_BT=self._observed(micro_batch),
            mode="token-mean",
            denominator=self.num_tokens,
        )

    def _observed(self, micro_batch: MicroBatch) -> Tensor:
        """Return the observations of a micro-batch. A spare micro-batch has none, because its rows count elsewhere."""
        observed_BR = micro_batch.cut(self.is_observed_BR)
        return torch.zeros_like(observed_BR) if micro_batch.is_spare else observed_BR
