"""The critic: a model that predicts the return at each token, and its optimiser.

B rows of a batch, R response width.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from agent_loop.config import CriticConfig, ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.advantages.groups import rollouts_of_rows
from agent_loop.training.forward import outputs_at, sampled_tokens
from agent_loop.training.losses.terms import masked_mean, value_loss
from agent_loop.training.micro_batches import MicroBatch, trainable_rows
from agent_loop.training.passes import TrainedModel, UpdateStats
from agent_loop.training.policy import device_of
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup


class Critic(TrainedModel):
    """Owner of the critic's model and optimiser. Call one method at a time, from any thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: CriticConfig,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        process_group: ProcessGroup = SINGLE_PROCESS,
        num_threads: int = 1,
    ) -> None:
        """Take ownership of a loaded model."""
        super().__init__(
            model,
            config=config,
            section="critic",
            dtype=dtype,
            seed=seed,
            process_group=process_group,
            num_threads=num_threads,
        )
        self._config = config

    def values(self, batch: RolloutBatch, *, rows: Tensor) -> Tensor:
        """Return the values predicted before each sampled token; [B, R] float32, 0 elsewhere."""
        return self._compute(lambda part: _response_values(self.model, part), batch, rows)

    def update(
        self, batch: RolloutBatch, *, returns_BR: Tensor, old_values_BR: Tensor, keep_B: Tensor | None = None
    ) -> dict[str, float]:
        """Run one update: `ppo_epochs` passes of `ppo_mini_batches` optimiser steps each.

        Args:
            batch: Batch that `assemble` returned.
            returns_BR: Returns to predict before each sampled token.
            old_values_BR: Result of `values` under the current weights.
            keep_B: True for rows to train on; None is all.

        Returns:
            Metrics, by the names in `agent_loop.training.metrics`; empty if no row remains.
        """
        rows = trainable_rows(batch, keep_B)
        if not len(rows):
            return {}
        lr = self._optimizer.start_update()
        stats = UpdateStats("critic", process_group=self._process_group)
        rollouts_B = rollouts_of_rows(batch)
        for mini_batch_rows in self._optimizer.mini_batches(rows, rollouts_B=rollouts_B):
            self._step(batch, mini_batch_rows, rollouts_B, returns_BR, old_values_BR, stats)
        self._optimizer.end_update()
        fit = _fit(old_values_BR[rows], returns_BR[rows], mask_BR=batch["response_mask"][rows])
        return stats.metrics() | fit | {names.CRITIC_LEARNING_RATE: lr}

    def _step(
        self,
        batch: RolloutBatch,
        rows: Tensor,
        rollouts_B: Tensor,
        returns_BR: Tensor,
        old_values_BR: Tensor,
        stats: UpdateStats,
    ) -> None:
        config = self._config
        reduce = self._aggregation(batch, rows, rollouts_B)

        def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            result = value_loss(
                _response_values(self.model, micro_batch),
                old_values_BT=micro_batch.cut(old_values_BR),
                returns_BT=micro_batch.cut(returns_BR),
                mask_BT=micro_batch.mask_BR,
                clip_range=config.clip_range_value,
                reduce=reduce.cut(micro_batch.rows_B),
            )
            return result.loss, (result.loss.detach(), result.clip_fraction.detach())

        sums: defaultdict[str, float] = defaultdict(float)
        for _, (loss, clip_fraction) in self._add_gradients(loss_of, batch, rows):
            sums[names.CRITIC_LOSS] += float(loss)
            sums[names.CRITIC_CLIP_FRACTION] += float(clip_fraction)
        totals = self._process_group.sum_metrics(sums)
        stats.add_step(totals, grad_norm=self._optimizer.step(loss=totals[names.CRITIC_LOSS]))


def load_critic(
    config: CriticConfig, *, model_config: ModelConfig, path: str | Path | None = None
) -> PreTrainedModel:
    """Load a model with a head of one value per token, and move it to its device.

    A head that is not in the files starts at 0.
    """
    source = str(path or config.path or model_config.path)
    try:
        model, report = cast(Any, AutoModelForTokenClassification).from_pretrained(
            source,
            num_labels=1,
            dtype=torch.float32,
            trust_remote_code=model_config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"critic.path is {source!r}, which transformers cannot load with a head for tokens: {reason}"
        ) from error
    for name in report["missing_keys"]:
        if not name.startswith(f"{model.base_model_prefix}."):
            torch.nn.init.zeros_(model.get_parameter(name))
    return model.to(device_of(model_config))


def _response_values(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return the values of a micro-batch, [B, R]; float32, or float64 if the outputs are float64."""
    tokens = sampled_tokens(model, micro_batch)
    values_N = outputs_at(model, tokens.before_N, tokens.inputs).squeeze(-1)
    precise_N = values_N.to(torch.promote_types(values_N.dtype, torch.float32))
    return tokens.spread(precise_N[tokens.place_M])


def _fit(values_BR: Tensor, returns_BR: Tensor, *, mask_BR: Tensor) -> dict[str, float]:
    """Return metrics of the critic's predictions before the update."""
    returns_N, errors_N = returns_BR[mask_BR.bool()], (returns_BR - values_BR)[mask_BR.bool()]
    metrics = {
        names.VALUE_MEAN: float(masked_mean(values_BR, mask_BT=mask_BR)),
        names.RETURN_MEAN: float(returns_N.mean()),
    }
    variance = float(returns_N.var(correction=0))
    if variance > 0:
        metrics[names.EXPLAINED_VARIANCE] = 1 - float(errors_N.var(correction=0)) / variance
    return metrics
