"""Loss of the policy at the tokens of a micro-batch, with all its terms. B rows, R response width."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from agent_loop.config import ActorConfig
from agent_loop.registries import RegisteredFunction
from agent_loop.training import metrics as names
from agent_loop.training.losses import (
    Aggregation,
    kl_penalty,
    masked_difference,
    token_loss,
    weight_sums,
)
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.observation_loss import ObservationLoss
from agent_loop.training.policy import ResponseLogProbs
from agent_loop.training.targets import Targets

Values: TypeAlias = dict[str, Tensor]


@dataclass(slots=True)
class LossTerms:
    """Loss of a micro-batch, as its part of the loss of the mini-batch."""

    loss: Tensor
    """Sum of all terms, with a gradient."""
    metrics: Values = field(default_factory=Values)
    """Parts of the metrics of the mini-batch."""
    of_tokens: Values = field(default_factory=Values)
    """Values of each token, [B, R]."""

    def add(self, name: str, values_BR: Tensor, *, mean: Tensor, coef: float) -> None:
        """Add `coef` times the mean of values of tokens to the loss, and both to the metrics."""
        self.loss = self.loss + coef * mean
        self.metrics[name], self.of_tokens[name] = mean.detach(), values_BR.detach()


@dataclass(frozen=True, slots=True)
class ActorLoss:
    """Loss of the policy in one mini-batch.

    It is the policy loss with the bonus of the entropy, the KL penalty, the divergence from teachers, and the
    cross-entropy of observations, as far as each has a weight.
    """

    config: ActorConfig
    policy_loss: RegisteredFunction
    targets: Targets
    reduce: Aggregation
    """Aggregation of the mini-batch."""
    observations: ObservationLoss | None

    def __call__(self, found: ResponseLogProbs, micro_batch: MicroBatch) -> LossTerms:
        """Return the loss of a micro-batch.

        Args:
            found: Log-probs at the tokens of the micro-batch; those of observations count for their loss alone.
            micro_batch: Rows of the mini-batch.
        """
        mask_BR, targets, config = micro_batch.mask_BR, self.targets, self.config
        reduce = self.reduce.cut(micro_batch.rows_B)
        logprobs_BR = torch.where(mask_BR.bool(), found.sampled_BR, 0.0)
        terms = self._policy_terms(logprobs_BR, found.entropy_BR, micro_batch, reduce)
        reference_BR = targets.past.reference_BR
        if reference_BR is not None and config.kl_loss_coef:
            kl_BR = kl_penalty(
                logprobs_BR,
                reference_logprobs_BT=micro_batch.cut(reference_BR),
                mask_BT=mask_BR,
                estimator=config.kl_loss_type,
            )
            terms.add(names.KL_LOSS, kl_BR, mean=reduce(kl_BR, mask_BT=mask_BR), coef=config.kl_loss_coef)
        if targets.teachers is not None:
            kl_BR = targets.teachers.losses(found, micro_batch)
            mean, coef = reduce(kl_BR, mask_BT=mask_BR), targets.teachers.config.coef
            terms.add(names.DISTILLATION_LOSS, kl_BR, mean=mean, coef=coef)
        if self.observations is not None:
            mean = self.observations(found.sampled_BR, micro_batch)
            terms.loss = terms.loss + self.observations.coefficient * mean
            terms.metrics[names.OBSERVATION_LOSS] = mean.detach()
        terms.metrics[names.LOSS] = terms.loss.detach()
        return terms

    def _policy_terms(
        self, logprobs_BR: Tensor, entropy_BR: Tensor, micro_batch: MicroBatch, reduce: Aggregation
    ) -> LossTerms:
        """Return the policy loss with the bonus of the entropy."""
        targets, mask_BR = self.targets, micro_batch.mask_BR
        old_BR = micro_batch.cut(targets.past.old_BR)
        policy = token_loss(
            self.policy_loss,
            logprobs_BR,
            old_logprobs_BT=old_BR,
            advantages_BT=micro_batch.cut(targets.advantages_BR),
            mask_BT=mask_BR,
            config=self.config,
        )
        loss_BR = policy.loss_BT
        if targets.weights_BR is not None:
            loss_BR = loss_BR * micro_batch.cut(targets.weights_BR)
        terms = LossTerms(reduce(loss_BR, mask_BT=mask_BR))
        log_ratio_BR = masked_difference(logprobs_BR.detach(), old_BR, mask_BT=mask_BR)
        terms.metrics |= {
            names.ACTOR + name: reduce(values_BR.detach(), mask_BT=mask_BR)
            for name, values_BR in policy.metrics.items()
        }
        terms.metrics[names.PPO_KL] = reduce(-log_ratio_BR, mask_BT=mask_BR)
        terms.metrics |= weight_sums(log_ratio_BR.exp(), mask_BT=mask_BR)
        entropy = reduce(entropy_BR, mask_BT=mask_BR)
        terms.add(names.ENTROPY, entropy_BR, mean=entropy, coef=-self.config.entropy_coeff)
        if "clip_fraction" in policy.metrics:
            terms.of_tokens[names.CLIP_FRACTION] = policy.metrics["clip_fraction"].detach()
        return terms
