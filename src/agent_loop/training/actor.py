"""The actor: the policy's weights, its optimiser, and one PPO update.

B rows of a batch, P prompt width, R response width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ActorConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.losses import PolicyLoss, aggregate, kl_penalty, loss_denominator, policy_loss
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.policy import make_exact, response_log_probs
from agent_loop.training.tally import UpdateTally


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
            model: The policy; stays on its device.
            config: How to train it.
            temperature: That of the rollout. Log-probs are compared at this temperature; at 0 (greedy) servers
                give them at 1, and so does the actor.
            reference: The policy that `config.kl_loss_coef` pulls towards; needed if that is not 0.
            seed: Decides how rows are dealt into mini-batches.
        """
        if config.kl_loss_coef and reference is None:
            raise ValueError(
                f"kl_loss_coef is {config.kl_loss_coef}, which needs a reference model; give one"
            )
        self.model = model
        self._config = config
        self._temperature = temperature or 1.0
        self._reference = reference
        self._num_updates = 0
        self._generator = torch.Generator().manual_seed(seed)
        make_exact(model, gradient_checkpointing=config.gradient_checkpointing)
        if reference is not None:
            make_exact(reference.requires_grad_(False), gradient_checkpointing=False)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs of the response tokens under the weights of this moment; [B, R] float32, 0 at padding."""
        return self._log_probs_of(self.model, batch, torch.arange(batch.batch_size[0]))

    def update(
        self,
        batch: RolloutBatch,
        *,
        advantages_B: Tensor,
        turn_advantages_BR: Tensor | None = None,
        keep_B: Tensor | None = None,
    ) -> dict[str, float]:
        """One PPO update: `ppo_epochs` passes of `ppo_mini_batches` optimiser steps each.

        The old log-probs are those of the rollout; where the servers gave none, they are computed first.

        Args:
            batch: As `assemble` makes it.
            advantages_B: One per row; each token of the row gets it.
            turn_advantages_BR: Added to it token by token.
            keep_B: True for rows to train on; None is all of them. Rows without a token of the model's are left
                out anyway. If no row remains, the weights stay as they are.

        Returns:
            Metrics, by the names in `agent_loop.training.metrics`; means over the optimiser steps.

        Raises:
            DataError: A row has no prompt.
        """
        is_trainable_B = batch["response_mask"].any(dim=1)
        rows = (is_trainable_B if keep_B is None else is_trainable_B & keep_B).nonzero().flatten()
        if not len(rows):
            return {names.SKIPPED_UPDATE: 1.0, names.ROWS_TRAINED: 0.0}
        _refuse_empty_prompts(batch, rows)
        lr = self._warm_up()
        if turn_advantages_BR is None:
            turn_advantages_BR = torch.zeros(1, 1).expand(batch["responses"].shape)
        targets = self._targets(batch, rows, advantages_B[:, None] + turn_advantages_BR)
        tally = UpdateTally()
        for _ in range(self._config.ppo_epochs):
            for mini_batch_rows in self._mini_batches(rows):
                self._optimizer_step(batch, mini_batch_rows, targets, tally)
        self._num_updates += 1
        return tally.metrics() | {
            names.SKIPPED_UPDATE: 0.0,
            names.ROWS_TRAINED: float(len(rows)),
            names.LEARNING_RATE: lr,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under the names of the model's state dict, tied ones once. They share the actor's memory:
        take what is needed before the next update."""
        persistent = self.model.state_dict().keys()
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                yield name, buffer.detach()

    def state_dict(self) -> dict[str, Any]:
        """All that the actor holds beside the model: optimiser, warm-up and random state."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self._num_updates,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_updates = int(state["num_updates"])
        self._generator.set_state(state["generator"])

    def _warm_up(self) -> float:
        share = min(1.0, (self._num_updates + 1) / max(1, self._config.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * share
        return self._config.lr * share

    def _targets(self, batch: RolloutBatch, rows: Tensor, advantages_BR: Tensor) -> _Targets:
        rollout_BR: Tensor | None = cast(Any, batch).get("rollout_log_probs")
        old_BR = self._log_probs_of(self.model, batch, rows) if rollout_BR is None else rollout_BR
        reference_BR = None
        if self._reference is not None and self._config.kl_loss_coef:
            reference_BR = self._log_probs_of(self._reference, batch, rows)
        return _Targets(
            advantages_BR=advantages_BR,
            old_log_probs_BR=old_BR,
            rollout_log_probs_BR=rollout_BR,
            reference_log_probs_BR=reference_BR,
        )

    def _mini_batches(self, rows: Tensor) -> list[Tensor]:
        shuffled = rows[torch.randperm(len(rows), generator=self._generator)]
        return list(shuffled.tensor_split(min(self._config.ppo_mini_batches, len(rows))))

    def _optimizer_step(
        self, batch: RolloutBatch, rows: Tensor, targets: _Targets, tally: UpdateTally
    ) -> None:
        mode = self._config.loss_agg_mode
        denominator = loss_denominator(batch["response_mask"][rows], mode=mode)
        self._optimizer.zero_grad()
        sums: defaultdict[str, float] = defaultdict(float)
        for micro_batch in self._cut(batch, rows):
            log_probs_BR, entropy_BR = response_log_probs(
                self.model, micro_batch, temperature=self._temperature
            )
            if tally.num_steps == 0:
                tally.compare(log_probs_BR.detach(), targets.rollout_log_probs_BR, micro_batch)
            loss = self._loss(log_probs_BR, entropy_BR, micro_batch, targets, denominator, sums)
            cast(Any, loss).backward()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        if math.isfinite(grad_norm):
            cast(Any, self._optimizer).step()
        self._optimizer.zero_grad()
        tally.add_step({**sums, names.GRAD_NORM: grad_norm})

    def _loss(
        self,
        log_probs_BR: Tensor,
        entropy_BR: Tensor,
        micro_batch: MicroBatch,
        targets: _Targets,
        denominator: float,
        sums: defaultdict[str, float],
    ) -> Tensor:
        """This micro-batch's share of the mini-batch's loss; adds its share of the metrics to `sums`."""
        config, mask_BR = self._config, micro_batch.mask_BR

        def share(values_BR: Tensor) -> Tensor:
            return aggregate(values_BR, mask_BT=mask_BR, mode=config.loss_agg_mode, denominator=denominator)

        policy: PolicyLoss = policy_loss(
            log_probs_BR,
            old_log_probs_BT=micro_batch.cut(targets.old_log_probs_BR),
            advantages_BT=micro_batch.cut(targets.advantages_BR),
            mask_BT=mask_BR,
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            agg_mode=config.loss_agg_mode,
            denominator=denominator,
        )
        entropy = share(entropy_BR)
        loss = policy.loss - config.entropy_coeff * entropy
        if targets.reference_log_probs_BR is not None:
            reference_BR = micro_batch.cut(targets.reference_log_probs_BR)
            kl = share(kl_penalty(log_probs_BR, reference_log_probs_BT=reference_BR, mask_BT=mask_BR))
            loss = loss + config.kl_loss_coef * kl
            sums[names.KL_LOSS] += float(kl.detach())
        sums[names.LOSS] += float(loss.detach())
        sums[names.PPO_KL] += float(policy.ppo_kl.detach())
        sums[names.CLIP_FRACTION] += float(policy.clip_fraction.detach())
        sums[names.ENTROPY] += float(entropy.detach())
        return loss

    @torch.no_grad()
    def _log_probs_of(self, model: PreTrainedModel, batch: RolloutBatch, rows: Tensor) -> Tensor:
        log_probs_BR = torch.zeros(batch["responses"].shape, dtype=torch.float32)
        for micro_batch in self._cut(batch, rows):
            part_BR, _ = response_log_probs(model, micro_batch, temperature=self._temperature)
            width = micro_batch.mask_BR.shape[1]
            is_token_BR = micro_batch.attention_mask_BW[:, micro_batch.attention_mask_BW.shape[1] - width :]
            log_probs_BR[micro_batch.rows_B, :width] = (
                torch.where(is_token_BR.bool(), part_BR, 0).float().cpu()
            )
        return log_probs_BR

    def _cut(self, batch: RolloutBatch, rows: Tensor) -> Iterator[MicroBatch]:
        return micro_batches(
            batch, rows=rows, max_tokens=self._config.max_tokens_per_micro_batch, device=self.model.device
        )


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the new log-probs are held against; rows and columns of the whole batch."""

    advantages_BR: Tensor
    old_log_probs_BR: Tensor
    rollout_log_probs_BR: Tensor | None
    reference_log_probs_BR: Tensor | None


def _refuse_empty_prompts(batch: RolloutBatch, rows: Tensor) -> None:
    prompt_lengths = batch["attention_mask"][rows, : batch["prompts"].shape[1]].sum(dim=1)
    if not prompt_lengths.all():
        row = int(rows[int(prompt_lengths.argmin())])
        raise DataError(
            f"{batch['trajectory_id'][row]} has an empty prompt, so nothing predicts its first token; give it at "
            "least one token"
        )
