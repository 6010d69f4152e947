"""The actor: the policy's weights, its optimiser, and one PPO update.

B rows of a batch, P prompt width, R response width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ActorConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.actor_loss import ActorLoss, PastLogProbs, Targets, importance, observation_mask
from agent_loop.training.adapters import without_adapters
from agent_loop.training.distillation.targets import TeacherTargets
from agent_loop.training.forward import prepare_layout, response_logprobs
from agent_loop.training.losses.policy import load_policy_loss
from agent_loop.training.losses.terms import WEIGHT_SUMS, effective_share, masked_difference
from agent_loop.training.master_weights import take_weights
from agent_loop.training.micro_batches import MicroBatch, trainable_rows
from agent_loop.training.policy import make_exact
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup
from agent_loop.training.trained_model import TrainedModel

TRAIN_LOG_PROBS = "train_logprobs"
"""Column that an update adds to its batch, float32 [B, R]: log-probs before the update, NaN in rows without."""


class Actor(TrainedModel):
    """Owner of the policy's model and optimiser, and the only writer of its weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: ActorConfig,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Take ownership of the loaded policy, and of the reference policy of the KL penalty if it has a weight.

        Log-probs are compared at the temperature of the rollout. At 0 (greedy), servers return log-probs at temperature
        1, so the actor computes them at 1 too. The policy as `reference` stands for the policy without its adapters.
        The other arguments are those of `TrainedModel`.
        """
        if config.kl_loss_coef and reference is None:
            raise ValueError(
                f"kl_loss_coef is {config.kl_loss_coef}, which needs a reference model; give one"
            )
        super().__init__(model, config=config, dtype=dtype, seed=seed, process_group=process_group)
        self._config = config
        self._policy_loss = load_policy_loss(config.policy_loss)
        self._temperature = temperature or 1.0
        self._reference = reference
        if reference is not None and reference is not model:
            make_exact(reference.requires_grad_(False), gradient_checkpointing=False)
            prepare_layout(reference, config=config)
            take_weights(reference, process_group=process_group, dtype=dtype)

    def logprobs(self, batch: RolloutBatch, *, rows: Tensor | None = None) -> Tensor:
        """Return the log-probs of the sampled tokens under the current weights; [B, R] float32, 0 elsewhere."""
        return self._logprobs_of(self.model, batch, torch.arange(len(batch)) if rows is None else rows)

    def past_logprobs(self, batch: RolloutBatch, *, rows: Tensor) -> PastLogProbs:
        """Return the log-probs that an update of these rows is compared with.

        The old log-probs are those of the rollout. The actor computes them if `old_log_probs` is `recompute` or the
        servers returned none.
        """
        rollout_BR: Tensor | None = cast(Any, batch).get("rollout_log_probs")
        old_BR = rollout_BR
        if old_BR is None or self._config.old_log_probs == "recompute":
            old_BR = self.logprobs(batch, rows=rows)
        reference_BR = None
        if self._reference is not None:
            with without_adapters(self._reference):
                reference_BR = self._logprobs_of(self._reference, batch, rows)
        return PastLogProbs(old_BR=old_BR, rollout_BR=rollout_BR, reference_BR=reference_BR)

    def update(
        self,
        batch: RolloutBatch,
        *,
        advantages_BR: Tensor,
        keep_B: Tensor | None = None,
        past: PastLogProbs | None = None,
        teachers: TeacherTargets | None = None,
    ) -> dict[str, float]:
        """Run one PPO update: `ppo_epochs` passes of `ppo_mini_batches` optimiser steps each.

        Return metrics, which are means over the optimiser steps. The advantages may be a tensor that expands to [B, R].
        Only rows with a sampled token are trained, of those in `keep_B`. If no row remains, the weights do not change.
        `past` is the result of `past_logprobs` for these rows under the current weights; None computes it. `teachers`
        are a term of the loss.
        """
        rows = trainable_rows(batch, keep_B)
        if not len(rows):
            return {names.SKIPPED_UPDATE: 1.0, names.ROWS_TRAINED: 0.0}
        past = past or self.past_logprobs(batch, rows=rows)
        weights_BR, metrics = importance(batch, rows=rows, past=past, config=self._config.correction)
        targets = Targets(
            advantages_BR=advantages_BR.expand(batch["responses"].shape),
            weights_BR=weights_BR,
            past=past,
            teachers=teachers,
            observed_BR=observation_mask(batch) if self._config.observation_coeff else None,
        )
        mini_batches: list[Tensor] = []
        steps: list[Mapping[str, float]] = []
        first_BR = torch.zeros(batch["responses"].shape)
        for mini_batch in self.mini_batches(batch, rows):
            steps.append(self._step(batch, mini_batch, targets, first_BR=None if steps else first_BR))
            mini_batches.append(mini_batch)
        if past.old_BR is past.rollout_BR:
            own_BR, known = self.process_group.sum_tensor(first_BR), mini_batches[0]
        else:
            own_BR, known = past.old_BR, rows
        batch[TRAIN_LOG_PROBS] = torch.full_like(first_BR, torch.nan).index_copy(0, known, own_BR[known])
        if past.rollout_BR is not None:
            mask_BR = batch["response_mask"][known]
            metrics |= _mismatch(own_BR[known], past.rollout_BR[known], mask_BR=mask_BR)
        return {
            **self.mean_metrics(steps),
            **metrics,
            names.SKIPPED_UPDATE: 0.0,
            names.ROWS_TRAINED: float(len(rows)),
        }

    def supervise(self, batch: RolloutBatch, *, advances_schedule: bool = True) -> dict[str, float]:
        """Take one optimiser step on the mean cross-entropy of the sampled tokens, at temperature 1; return metrics.

        If no row has a sampled token, the weights do not change. With `advances_schedule`, the step counts in the
        warm-up and the decay of the learning rate.
        """
        rows = trainable_rows(batch)
        if not len(rows):
            return {names.SFT_TOKENS: 0.0}
        num_tokens = float(batch["response_mask"].sum())

        def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            found = response_logprobs(self.model, micro_batch, temperature=1.0, entropy_has_gradient=False)
            loss = -found.sampled_BR.sum() / num_tokens
            return loss, {names.SFT_LOSS: loss.detach()}

        lr = self.optimizer.start_update()
        sums = self.forward_backward(batch, rows, loss_of)
        grad_norm = self.optimizer.step(loss=sums[names.SFT_LOSS])
        if advances_schedule:
            self.optimizer.end_update()
        return sums | {
            names.SFT_TOKENS: num_tokens,
            names.SFT_GRAD_NORM: grad_norm,
            names.SFT_LEARNING_RATE: lr,
        }

    def _step(
        self, batch: RolloutBatch, rows: Tensor, targets: Targets, *, first_BR: Tensor | None
    ) -> dict[str, float]:
        """Run one optimiser step. The first step writes the log-probs that it computes to `first_BR`."""
        observed_BR, teachers = targets.observed_BR, targets.teachers
        loss = ActorLoss(
            model=self.model,
            temperature=self._temperature,
            config=self._config,
            policy_loss=self._policy_loss,
            targets=targets,
            reduce=self.aggregation(batch, rows),
            num_observed=1.0 if observed_BR is None else max(1.0, float(observed_BR[rows].sum())),
            first_BR=first_BR,
        )
        sums = self.step(batch, rows, loss)
        sums[names.RATIO_ESS] = effective_share({name: sums.pop(name) for name in WEIGHT_SUMS})
        return sums if teachers is None else sums | teachers.pop_means(sums)

    def _logprobs_of(self, model: PreTrainedModel, batch: RolloutBatch, rows: Tensor) -> Tensor:
        def logprobs_of(micro_batch: MicroBatch) -> Tensor:
            return response_logprobs(model, micro_batch, temperature=self._temperature).sampled_BR

        return self.compute(logprobs_of, batch, rows, model=model)


def _mismatch(logprobs_BR: Tensor, rollout_BR: Tensor, *, mask_BR: Tensor) -> dict[str, float]:
    """Return metrics of the log-ratios of trainer to rollout. The rollout sampled, so `k1` is minus their mean."""
    log_ratios_N = masked_difference(logprobs_BR, rollout_BR, mask_BT=mask_BR)[mask_BR.bool()]
    differences_N = log_ratios_N.abs()
    return {
        names.LOGPROB_DIFF_MAX: float(differences_N.max()),
        names.LOGPROB_DIFF_MEAN: float(differences_N.mean()),
        names.MISMATCH_K1: float(-log_ratios_N.mean()),
        names.MISMATCH_K3: float((log_ratios_N.exp() - 1 - log_ratios_N).mean()),
    }
