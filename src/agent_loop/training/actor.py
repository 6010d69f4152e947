"""The actor: the policy's weights, its optimiser, and one PPO update.

B rows of a batch, P prompt width, R response width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ActorConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.adapters import has_adapters, merged_parameters
from agent_loop.training.losses import Aggregation, kl_penalty, loss_denominator, policy_loss
from agent_loop.training.micro_batches import MicroBatch, micro_batches, trainable_rows
from agent_loop.training.optimizer import Optimizer
from agent_loop.training.packing import prove_packing
from agent_loop.training.policy import make_exact, response_log_probs
from agent_loop.training.tally import StepNames, UpdateTally
from agent_loop.training.targets import PastLogProbs, Targets, importance

STEP_NAMES = StepNames(
    grad_norm=names.GRAD_NORM,
    optimizer_steps=names.OPTIMIZER_STEPS,
    nonfinite_updates=names.NONFINITE_UPDATES,
)


class Actor:
    """Owns the model and the optimiser; the only writer of the weights. One call at a time, from any thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: ActorConfig,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        seed: int = 0,
    ) -> None:
        """Takes over a loaded model.

        Args:
            model: The policy; stays on its device. Parameters that want no gradient are left as they are.
            config: How to train it.
            temperature: That of the rollout. Log-probs are compared at this temperature; at 0 (greedy) servers
                give them at 1, and so does the actor.
            reference: The policy that a KL penalty pulls towards; needed if `config.kl_loss_coef` is not 0.
            seed: Decides how rows are dealt into mini-batches.

        Raises:
            ConfigError: The model cannot be trained on packed rows.
        """
        if config.kl_loss_coef and reference is None:
            raise ValueError(
                f"kl_loss_coef is {config.kl_loss_coef}, which needs a reference model; give one"
            )
        self.model = model
        self._config = config
        self._temperature = temperature or 1.0
        self._reference = reference
        make_exact(model, gradient_checkpointing=config.gradient_checkpointing)
        if reference is not None:
            make_exact(reference.requires_grad_(False), gradient_checkpointing=False)
        if config.use_packing:
            prove_packing(model)
        self._optimizer = Optimizer(model, config=config, seed=seed)

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs of the response tokens under the weights of this moment; [B, R] float32, 0 at padding."""
        return self._log_probs_of(self.model, batch, torch.arange(batch.batch_size[0]))

    def past_log_probs(self, batch: RolloutBatch, *, rows: Tensor) -> PastLogProbs:
        """What an update of these rows is measured against.

        The old log-probs are those of the rollout, unless the configuration wants them computed or the servers gave
        none.
        """
        rollout_BR: Tensor | None = cast(Any, batch).get("rollout_log_probs")
        old_BR = rollout_BR
        if old_BR is None or self._config.old_log_probs == "recompute":
            old_BR = self._log_probs_of(self.model, batch, rows)
        reference_BR = None
        if self._reference is not None:
            reference_BR = self._log_probs_of(self._reference, batch, rows)
        return PastLogProbs(old_BR=old_BR, rollout_BR=rollout_BR, reference_BR=reference_BR)

    def update(
        self,
        batch: RolloutBatch,
        *,
        advantages_BR: Tensor,
        keep_B: Tensor | None = None,
        past: PastLogProbs | None = None,
    ) -> dict[str, float]:
        """One PPO update: `ppo_epochs` passes of `ppo_mini_batches` optimiser steps each.

        Args:
            batch: As `assemble` makes it.
            advantages_BR: One per token, or anything that expands to it.
            keep_B: True for rows to train on; None is all of them. Rows without a token of the model's are left
                out anyway. If no row remains, the weights stay as they are.
            past: Of `past_log_probs`, at least for these rows and under these weights; None computes it.

        Returns:
            Metrics, by the names in `agent_loop.training.metrics`; means over the optimiser steps.

        Raises:
            DataError: A row has no prompt, or the servers gave no log-probs and `correction` compares with them.
        """
        rows = trainable_rows(batch, keep_B)
        if not len(rows):
            return {names.SKIPPED_UPDATE: 1.0, names.ROWS_TRAINED: 0.0}
        past = past or self.past_log_probs(batch, rows=rows)
        weights_BR, metrics = importance(batch, rows=rows, past=past, config=self._config.correction)
        targets = Targets(
            advantages_BR=advantages_BR.expand(batch["responses"].shape), weights_BR=weights_BR, past=past
        )
        lr = self._optimizer.start_update()
        tally = UpdateTally(STEP_NAMES)
        for mini_batch_rows in self._optimizer.mini_batches(rows):
            self._step(batch, mini_batch_rows, targets, tally)
        self._optimizer.end_update()
        return tally.metrics() | {
            **metrics,
            names.SKIPPED_UPDATE: 0.0,
            names.ROWS_TRAINED: float(len(rows)),
            names.LEARNING_RATE: lr,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under the names of the model's state dict, tied ones once; adapters are merged into them.

        What has no adapter shares the actor's memory: take what is needed before the next update.
        """
        persistent = self.model.state_dict().keys()
        if has_adapters(self.model):
            yield from merged_parameters(self.model)
        else:
            yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                yield name, buffer.detach()

    def state_dict(self) -> dict[str, Any]:
        """All that the actor holds beside the model: optimiser, warm-up and random state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._optimizer.load_state_dict(state)

    def _step(self, batch: RolloutBatch, rows: Tensor, targets: Targets, tally: UpdateTally) -> None:
        config = self._config
        reduce = Aggregation(
            mode=config.loss_agg_mode,
            denominator=loss_denominator(
                batch["response_mask"][rows], mode=config.loss_agg_mode, length=config.loss_length
            ),
        )
        sums: defaultdict[str, float] = defaultdict(float)
        for micro_batch in self._cut(batch, rows):
            log_probs_BR, entropy_BR = response_log_probs(
                self.model, micro_batch, temperature=self._temperature
            )
            if tally.num_steps == 0:
                tally.compare(log_probs_BR.detach(), targets.past.rollout_BR, micro_batch)
            loss = self._loss(log_probs_BR, entropy_BR, micro_batch, targets, reduce, sums)
            cast(Any, loss).backward()
        tally.add_step(sums, grad_norm=self._optimizer.step())

    def _loss(
        self,
        log_probs_BR: Tensor,
        entropy_BR: Tensor,
        micro_batch: MicroBatch,
        targets: Targets,
        reduce: Aggregation,
        sums: defaultdict[str, float],
    ) -> Tensor:
        """This micro-batch's share of the mini-batch's loss; adds its share of the metrics to `sums`."""
        config, past, mask_BR = self._config, targets.past, micro_batch.mask_BR
        policy = policy_loss(
            log_probs_BR,
            old_log_probs_BT=micro_batch.cut(past.old_BR),
            advantages_BT=micro_batch.cut(targets.advantages_BR),
            mask_BT=mask_BR,
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
            level="sequence" if config.policy_loss == "gspo" else "token",
            weights_BT=None if targets.weights_BR is None else micro_batch.cut(targets.weights_BR),
            agg_mode=reduce.mode,
            denominator=reduce.denominator,
        )
        entropy = reduce(entropy_BR, mask_BT=mask_BR)
        loss = policy.loss - config.entropy_coeff * entropy
        if past.reference_BR is not None and config.kl_loss_coef:
            kl_BR = kl_penalty(
                log_probs_BR,
                reference_log_probs_BT=micro_batch.cut(past.reference_BR),
                mask_BT=mask_BR,
                estimator=config.kl_loss_type,
            )
            kl = reduce(kl_BR, mask_BT=mask_BR)
            loss = loss + config.kl_loss_coef * kl
            sums[names.KL_LOSS] += float(kl.detach())
        sums[names.LOSS] += float(loss.detach())
        sums[names.PPO_KL] += float(policy.ppo_kl.detach())
        sums[names.CLIP_FRACTION] += float(policy.clip_fraction.detach())
        if config.clip_ratio_c is not None:
            sums[names.DUAL_CLIP_FRACTION] += float(policy.dual_clip_fraction.detach())
        sums[names.ENTROPY] += float(entropy.detach())
        return loss

    @torch.no_grad()
    def _log_probs_of(self, model: PreTrainedModel, batch: RolloutBatch, rows: Tensor) -> Tensor:
        log_probs_BR = torch.zeros(batch["responses"].shape, dtype=torch.float32)
        for micro_batch in self._cut(batch, rows):
            part_BR, _ = response_log_probs(model, micro_batch, temperature=self._temperature)
            micro_batch.put(part_BR, into=log_probs_BR)
        return log_probs_BR

    def _cut(self, batch: RolloutBatch, rows: Tensor) -> Iterator[MicroBatch]:
        return micro_batches(
            batch,
            rows=rows,
            max_tokens=self._config.max_tokens_per_micro_batch,
            device=self.model.device,
            use_packing=self._config.use_packing,
        )
