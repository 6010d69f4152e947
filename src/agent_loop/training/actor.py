"""The actor: the policy's weights, its optimiser, and one PPO update.

B rows of a batch, P prompt width, R response width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ActorConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.actor_loss import (
    ActorLoss,
    LossTerms,
    ObservationLoss,
    PastLogProbs,
    Targets,
    importance,
)
from agent_loop.training.adapters import (
    AdaptedModel,
    are_low_rank,
    merged_parameters,
    persistent_buffers,
    without_adapters,
)
from agent_loop.training.advantages.groups import rollouts_of_rows
from agent_loop.training.distillation.targets import TeacherTargets
from agent_loop.training.forward import prepare_batching
from agent_loop.training.losses.policy import load_policy_loss
from agent_loop.training.losses.terms import WEIGHT_SUMS, effective_share
from agent_loop.training.master_weights import take_weights
from agent_loop.training.micro_batches import MicroBatch, trainable_rows
from agent_loop.training.passes import (
    TRAIN_LOG_PROBS,
    TrainedModel,
    UpdateStats,
)
from agent_loop.training.policy import make_exact, response_logprobs
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup


class Actor(TrainedModel):
    """Owner of the policy's model and optimiser, and the only writer of its weights.

    Call one method at a time, from any thread.
    """

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
        num_threads: int = 1,
    ) -> None:
        """Take ownership of a loaded model.

        Args:
            model: The policy; stays on its device. Parameters that require no gradient are not changed.
            config: Settings of the actor.
            temperature: Temperature of the rollout, at which log-probs are compared. At 0 (greedy), servers return
                log-probs at temperature 1, so the actor computes them at 1 too.
            reference: Reference policy of the KL penalty; needed if `config.kl_loss_coef` is not 0. The policy itself
                stands for the policy without its adapters.
            dtype: Dtype that the models compute in; None is the dtype of their parameters.
            seed: Seed of the shuffle into mini-batches.
            process_group: Process group over which the models are sharded.
            num_threads: Number of micro-batches that are computed at once; 1 in a process group of several ranks.
        """
        if config.kl_loss_coef and reference is None:
            raise ValueError(
                f"kl_loss_coef is {config.kl_loss_coef}, which needs a reference model; give one"
            )
        super().__init__(
            model,
            config=config,
            section="actor",
            dtype=dtype,
            seed=seed,
            process_group=process_group,
            num_threads=num_threads,
        )
        self._config = config
        self._policy_loss = load_policy_loss(config.policy_loss)
        self._temperature = temperature or 1.0
        self._reference = reference
        self._dtype = dtype or model.dtype
        self._adapted = (
            AdaptedModel(model, dtype=self._dtype, process_group=process_group)
            if are_low_rank(model)
            else None
        )
        if reference is not None and reference is not model:
            make_exact(reference.requires_grad_(False), gradient_checkpointing=False)
            self._pads &= prepare_batching(reference, config=config, section="actor")
            take_weights(reference, process_group=process_group, dtype=dtype)

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return the log-probs of the sampled tokens under the current weights; [B, R] float32, 0 elsewhere."""
        return self._logprobs_of(self.model, batch, torch.arange(batch.batch_size[0]))

    def past_logprobs(self, batch: RolloutBatch, *, rows: Tensor) -> PastLogProbs:
        """Return the log-probs that an update of these rows is compared with.

        The old log-probs are those of the rollout. The actor computes them if `old_log_probs` is `recompute` or the
        servers returned none.
        """
        rollout_BR: Tensor | None = cast(Any, batch).get("rollout_log_probs")
        old_BR = rollout_BR
        if old_BR is None or self._config.old_log_probs == "recompute":
            old_BR = self._logprobs_of(self.model, batch, rows)
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

        Args:
            batch: Batch that `assemble` returned.
            advantages_BR: Advantage of each token, or a tensor that expands to [B, R].
            keep_B: True for rows to train on; None is all. Rows without a sampled token are never trained. If no row
                remains, the weights do not change.
            past: Result of `past_logprobs` for these rows under the current weights; None computes it.
            teachers: Scores of teachers, as a term of the loss; None without such a term.

        Returns:
            Metrics, by the names in `agent_loop.training.metrics`; means over the optimiser steps.
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
        )
        lr = self._optimizer.start_update()
        stats = UpdateStats("actor", process_group=self._process_group)
        rollouts_B = rollouts_of_rows(batch)
        mini_batches = list(self._optimizer.mini_batches(rows, rollouts_B=rollouts_B))
        first_BR = torch.zeros(batch["responses"].shape)
        for mini_batch_rows in mini_batches:
            self._step(batch, mini_batch_rows, rollouts_B, targets, stats, first_BR)
        self._optimizer.end_update()
        batch[TRAIN_LOG_PROBS] = self._own_logprobs(past, rows, first_BR=first_BR, first_rows=mini_batches[0])
        return stats.metrics() | {
            **metrics,
            names.SKIPPED_UPDATE: 0.0,
            names.ROWS_TRAINED: float(len(rows)),
            names.LEARNING_RATE: lr,
        }

    def supervise(self, batch: RolloutBatch, *, advances_schedule: bool = True) -> dict[str, float]:
        """Take one optimiser step on the mean cross-entropy of the sampled tokens, at temperature 1.

        Args:
            batch: Batch that `assemble` returned. If no row has a sampled token, the weights do not change.
            advances_schedule: Count the step in the warm-up and the decay of the learning rate.

        Returns:
            Metrics, by the names in `agent_loop.training.metrics`.
        """
        rows = trainable_rows(batch)
        if not len(rows):
            return {names.SFT_TOKENS: 0.0}
        num_tokens = float(batch["response_mask"].sum())

        def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, float]:
            found = response_logprobs(self.model, micro_batch, temperature=1.0, entropy_has_gradient=False)
            loss = -found.sampled_BR.sum() / num_tokens
            return loss, float(loss.detach())

        lr = self._optimizer.start_update()
        parts = self._add_gradients(loss_of, batch, rows)
        sums = self._process_group.sum_metrics({names.SFT_LOSS: sum(part for _, part in parts)})
        grad_norm = self._optimizer.step(loss=sums[names.SFT_LOSS])
        if advances_schedule:
            self._optimizer.end_update()
        return sums | {
            names.SFT_TOKENS: num_tokens,
            names.SFT_GRAD_NORM: grad_norm,
            names.SFT_LEARNING_RATE: lr,
        }

    @property
    def trains_factors_alone(self) -> bool:
        """Whether only low-rank adapters are trained."""
        return self._adapted is not None

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return all weights by the names of the model's state dict, tied weights once, with adapters merged.

        Their dtype is the one that the model computes in. If `trains_factors_alone`, the result is `AdaptedWeights`.
        Otherwise, weights without an adapter that are not sharded share the actor's memory: read them before the next
        update.
        """
        return self._merged_weights() if self._adapted is None else self._adapted.weights()

    def _merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in merged_parameters(self.model):
            yield name, parameter.to(self._dtype)
        yield from persistent_buffers(self.model)

    def _own_logprobs(
        self, past: PastLogProbs, rows: Tensor, *, first_BR: Tensor, first_rows: Tensor
    ) -> Tensor:
        """Return the log-probs under the weights before the update; NaN in rows for which they were not computed."""
        if past.old_BR is past.rollout_BR:
            found_BR, rows = self._process_group.sum_tensor(first_BR), first_rows
        else:
            found_BR = past.old_BR
        own_BR = torch.full_like(first_BR, torch.nan)
        own_BR[rows] = found_BR[rows]
        return own_BR

    def _step(
        self,
        batch: RolloutBatch,
        rows: Tensor,
        rollouts_B: Tensor,
        targets: Targets,
        stats: UpdateStats,
        first_BR: Tensor,
    ) -> None:
        """Run one optimiser step. The first step writes the log-probs that it computes to `first_BR`."""
        config = self._config
        reduce = self._aggregation(batch, rows, rollouts_B)
        observations = ObservationLoss.of(batch, rows=rows, coefficient=config.observation_coeff)
        loss = ActorLoss(config, self._policy_loss, targets, reduce, observations)

        def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, LossTerms]]:
            found = response_logprobs(
                self.model,
                micro_batch if observations is None else observations.widened(micro_batch),
                temperature=self._temperature,
                entropy_has_gradient=config.entropy_coeff > 0,
                candidate_ids_BRK=targets.teachers and targets.teachers.candidate_ids(micro_batch),
            )
            terms = loss(found, micro_batch)
            return terms.loss, (found.sampled_BR.detach(), terms)

        sums: defaultdict[str, float] = defaultdict(float)
        for micro_batch, (logprobs_BR, terms) in self._add_gradients(loss_of, batch, rows):
            if stats.num_steps == 0:
                logprobs_BR = torch.where(micro_batch.mask_BR.bool(), logprobs_BR, 0.0)
                stats.compare(logprobs_BR, targets.past.rollout_BR, micro_batch)
                micro_batch.put(logprobs_BR, into=first_BR)
            for name, value in terms.metrics.items():
                sums[name] += float(value)
        totals = self._process_group.sum_metrics(sums)
        totals[names.RATIO_ESS] = effective_share({name: totals.pop(name) for name in WEIGHT_SUMS})
        if targets.teachers is not None:
            totals |= targets.teachers.pop_means(totals)
        stats.add_step(totals, grad_norm=self._optimizer.step(loss=totals[names.LOSS]))

    def _logprobs_of(self, model: PreTrainedModel, batch: RolloutBatch, rows: Tensor) -> Tensor:
        def logprobs_of(micro_batch: MicroBatch) -> Tensor:
            return response_logprobs(model, micro_batch, temperature=self._temperature).sampled_BR

        return self._compute(logprobs_of, batch, rows, device=model.device)
