"""Loss of the policy at the tokens of a micro-batch, with all its terms, and what they compare with.

B rows of a batch or of a micro-batch, R response width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from agent_loop.config import ActorConfig, CorrectionConfig
from agent_loop.errors import DataError
from agent_loop.registries import RegisteredFunction
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.advantages.groups import rollouts_of_rows
from agent_loop.training.distillation.targets import TeacherTargets
from agent_loop.training.losses.policy import token_loss
from agent_loop.training.losses.terms import (
    Aggregation,
    aggregate,
    correct,
    effective_share,
    kl_penalty,
    loss_denominator,
    masked_difference,
    weight_sums,
)
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.policy import ResponseLogProbs


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
    """Return importance weights of tokens, [B, R], and metrics; None as weights if `config.kind` is `none`."""
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
        """Return the loss of a mini-batch; None if the coefficient is 0."""
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


Values: TypeAlias = dict[str, Tensor]


@dataclass(slots=True)
class LossTerms:
    """Loss of a micro-batch, as its part of the loss of the mini-batch."""

    loss: Tensor
    """Sum of all terms, with a gradient."""
    metrics: Values = field(default_factory=Values)
    """Parts of the metrics of the mini-batch."""

    def add(self, name: str, mean: Tensor, *, coef: float) -> None:
        """Add `coef` times a mean to the loss, and the mean to the metrics."""
        self.loss = self.loss + coef * mean
        self.metrics[name] = mean.detach()


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
        """Return the loss of a micro-batch."""
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
            terms.add(names.KL_LOSS, reduce(kl_BR, mask_BT=mask_BR), coef=config.kl_loss_coef)
        if targets.teachers is not None:
            kl_BR = targets.teachers.losses(found, micro_batch)
            mean, coef = reduce(kl_BR, mask_BT=mask_BR), targets.teachers.config.coef
            terms.add(names.DISTILLATION_LOSS, mean, coef=coef)
            terms.metrics |= targets.teachers.sums(kl_BR.detach(), micro_batch)
        if self.observations is not None:
            mean = self.observations(found.sampled_BR, micro_batch)
            terms.add(names.OBSERVATION_LOSS, mean, coef=self.observations.coefficient)
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
        terms.add(names.ENTROPY, reduce(entropy_BR, mask_BT=mask_BR), coef=-self.config.entropy_coeff)
        return terms
