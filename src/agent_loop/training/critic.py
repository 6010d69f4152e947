"""The critic: a model that predicts the return at each token, and its optimiser.

B rows of a batch, R response width.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from agent_loop.config import CriticConfig, ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.forward import response_values
from agent_loop.training.losses.terms import Aggregation, masked_mean, value_loss
from agent_loop.training.micro_batches import MicroBatch, trainable_rows
from agent_loop.training.policy import device_of
from agent_loop.training.trained_model import TrainedModel


class Critic(TrainedModel):
    """Owner of the critic's model and optimiser."""

    section = "critic"

    def __init__(self, model: PreTrainedModel, *, config: CriticConfig, **options: Any) -> None:
        """Take ownership of a loaded model. The options are those of `TrainedModel`."""
        super().__init__(model, config=config, **options)
        self._config = config

    def values(self, batch: RolloutBatch, *, rows: Tensor) -> Tensor:
        """Return the values predicted before each sampled token; [B, R] float32, 0 elsewhere."""
        return self.compute(partial(response_values, self.model), batch, rows)

    def update(
        self, batch: RolloutBatch, *, returns_BR: Tensor, old_values_BR: Tensor, keep_B: Tensor | None = None
    ) -> dict[str, float]:
        """Run one update: `ppo_epochs` passes of `ppo_mini_batches` optimiser steps each.

        Return metrics; empty if `keep_B` leaves no row to train. `old_values_BR` is the result of `values` under the
        current weights.
        """
        rows = trainable_rows(batch, keep_B)
        if not len(rows):
            return {}
        steps: list[dict[str, float]] = []
        for mini_batch in self.mini_batches(batch, rows):
            reduce = self.aggregation(batch, mini_batch)

            def loss_of(
                micro_batch: MicroBatch, reduce: Aggregation = reduce
            ) -> tuple[Tensor, dict[str, Tensor]]:
                loss, clip_fraction = value_loss(
                    response_values(self.model, micro_batch),
                    old_values_BT=micro_batch.cut(old_values_BR),
                    returns_BT=micro_batch.cut(returns_BR),
                    mask_BT=micro_batch.mask_BR,
                    clip_range=self._config.clip_range_value,
                    reduce=reduce.cut(micro_batch.rows_B),
                )
                return loss, {names.CRITIC_LOSS: loss.detach(), names.CRITIC_CLIP_FRACTION: clip_fraction}

            steps.append(self.step(batch, mini_batch, loss_of))
        fit = _fit(old_values_BR[rows], returns_BR[rows], mask_BR=batch["response_mask"][rows])
        return self.mean_metrics(steps) | fit


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
