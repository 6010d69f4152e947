"""Loss of the policy at the tokens of a micro-batch, with all its terms, and what they compare with.

B rows of a batch or of a micro-batch, R response width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ActorConfig, CorrectionConfig
from agent_loop.errors import DataError
from agent_loop.registries import RegisteredFunction
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.advantages.groups import rollouts_of_rows
from agent_loop.training.distillation.targets import TeacherTargets
from agent_loop.training.forward import response_logprobs
from agent_loop.training.losses.policy import token_loss
from agent_loop.training.losses.terms import (
    Aggregation,
    correct,
    effective_share,
    kl_penalty,
    masked_difference,
    weight_sums,
)
from agent_loop.training.micro_batches import MicroBatch


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
    teachers: TeacherTargets | None
    """Scores of teachers, as a term of the loss; None without such a term."""
    observed_BR: Tensor | None
    """int64: 1 at observations, whose mean cross-entropy is a term of the loss; None without such a term."""


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


def observation_mask(batch: RolloutBatch) -> Tensor:
    """Return 1 at the observations of a batch, int64 [B, R] (ECHO, arXiv 2605.24517).

    They are the response tokens that no model sampled: the replies of tools and interactions, with what the chat
    template writes around them. Their log-probs are of the same forward pass as those of the policy loss, and at the
    temperature of the rollout.
    """
    is_response_BR = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
    return (is_response_BR & (batch["weight_versions"] < 0)).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLoss:
    """Loss of the policy in one mini-batch.

    It is the policy loss with the bonus of the entropy, the KL penalty, the divergence from teachers, and the
    cross-entropy of observations, as far as each has a weight.
    """

    model: PreTrainedModel
    temperature: float
    config: ActorConfig
    policy_loss: RegisteredFunction
    targets: Targets
    reduce: Aggregation
    """Aggregation of the mini-batch."""
    num_observed: float
    """Number of observations in the mini-batch, at least 1."""
    first_BR: Tensor | None
    """Tensor that gets the log-probs of the sampled tokens."""

    def __call__(self, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, and its parts of the metrics of the mini-batch."""
        mask_BR, targets, config = micro_batch.mask_BR, self.targets, self.config
        computed, observed_BR, teachers = micro_batch, None, targets.teachers
        if targets.observed_BR is not None:  # a spare micro-batch has none, because its rows count elsewhere
            observed_BR = micro_batch.cut(targets.observed_BR) * (not micro_batch.is_spare)
            computed = replace(micro_batch, mask_BR=mask_BR | observed_BR)
        found = response_logprobs(
            self.model,
            computed,
            temperature=self.temperature,
            entropy_has_gradient=config.entropy_coeff > 0,
            candidate_ids_BRK=teachers and teachers.candidate_ids(micro_batch),
        )
        logprobs_BR = torch.where(mask_BR.bool(), found.sampled_BR, 0.0)
        if self.first_BR is not None:
            micro_batch.put(logprobs_BR.detach(), into=self.first_BR)
        reduce = self.reduce.cut(micro_batch.rows_B)
        old_BR = micro_batch.cut(targets.past.old_BR)
        policy = token_loss(
            self.policy_loss,
            logprobs_BR,
            old_logprobs_BT=old_BR,
            advantages_BT=micro_batch.cut(targets.advantages_BR),
            mask_BT=mask_BR,
            config=config,
        )
        loss_BR = policy.loss_BT
        if targets.weights_BR is not None:
            loss_BR = loss_BR * micro_batch.cut(targets.weights_BR)
        log_ratio_BR = masked_difference(logprobs_BR.detach(), old_BR, mask_BT=mask_BR)
        metrics = {
            names.ACTOR + name: reduce(values_BR.detach(), mask_BT=mask_BR)
            for name, values_BR in policy.metrics.items()
        }
        metrics[names.PPO_KL] = reduce(-log_ratio_BR, mask_BT=mask_BR)
        metrics |= weight_sums(log_ratio_BR.exp(), mask_BT=mask_BR)

        entropy = reduce(found.entropy_BR, mask_BT=mask_BR)
        terms = [(names.ENTROPY, entropy, -config.entropy_coeff)]
        reference_BR = targets.past.reference_BR
        if reference_BR is not None and config.kl_loss_coef:
            kl_BR = kl_penalty(
                logprobs_BR,
                reference_logprobs_BT=micro_batch.cut(reference_BR),
                mask_BT=mask_BR,
                estimator=config.kl_loss_type,
            )
            terms.append((names.KL_LOSS, reduce(kl_BR, mask_BT=mask_BR), config.kl_loss_coef))
        if teachers is not None:
            kl_BR = teachers.losses(found, micro_batch)
            divergence = reduce(kl_BR, mask_BT=mask_BR)
            terms.append((names.DISTILLATION_LOSS, divergence, teachers.config.coef))
            metrics |= teachers.sums(kl_BR.detach(), micro_batch)
        if observed_BR is not None:
            cross_entropy = torch.where(observed_BR.bool(), -found.sampled_BR, 0.0).sum() / self.num_observed
            terms.append((names.OBSERVATION_LOSS, cross_entropy, config.observation_coeff))
        loss = reduce(loss_BR, mask_BT=mask_BR)
        for name, mean, coefficient in terms:
            loss = loss + coefficient * mean
            metrics[name] = mean.detach()
        metrics[names.LOSS] = loss.detach()
        return loss, metrics
