"""The critic: a model that predicts the return at each token, and its optimiser.

B rows of a batch, R response width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
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
from agent_loop.training.forward import outputs_at, prepare_batching, sampled_tokens
from agent_loop.training.losses.terms import Aggregation, masked_mean, value_loss
from agent_loop.training.master_weights import save_model, take_weights
from agent_loop.training.micro_batches import MicroBatch, micro_batches_of_rank, trainable_rows
from agent_loop.training.optimizer import Optimizer
from agent_loop.training.passes import StepNames, UpdateStats, add_gradients, compute_each
from agent_loop.training.policy import device_of, make_exact
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup

STEP_NAMES = StepNames(
    grad_norm=names.CRITIC_GRAD_NORM,
    optimizer_steps=names.CRITIC_OPTIMIZER_STEPS,
    nonfinite_updates=names.CRITIC_NONFINITE_UPDATES,
)


class Critic:
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
        self.model = model
        self._config = config
        make_exact(model, gradient_checkpointing=config.gradient_checkpointing)
        self._pads = prepare_batching(model, config=config, section="critic")
        self._process_group = process_group
        self._num_threads = num_threads
        self._weights = take_weights(
            model, process_group=process_group, dtype=dtype, on_host=config.optimizer_on_host
        )
        self._optimizer = Optimizer(self._weights, config=config, seed=seed)

    @property
    def num_updates(self) -> int:
        return self._optimizer.num_updates

    def values(self, batch: RolloutBatch, *, rows: Tensor) -> Tensor:
        """Return the values predicted before each sampled token; [B, R] float32, 0 elsewhere."""

        @torch.no_grad()
        def values_of(micro_batch: MicroBatch) -> Tensor:
            return _response_values(self.model, micro_batch)

        values_BR = torch.zeros(batch["responses"].shape, dtype=torch.float32)
        for micro_batch, part_BR in compute_each(
            values_of, self._cut(batch, rows), num_threads=self._num_threads
        ):
            micro_batch.put(part_BR, into=values_BR)
        return self._process_group.sum_tensor(values_BR)

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
        stats = UpdateStats(STEP_NAMES, process_group=self._process_group)
        rollouts_B = rollouts_of_rows(batch)
        for mini_batch_rows in self._optimizer.mini_batches(rows, rollouts_B=rollouts_B):
            self._step(batch, mini_batch_rows, rollouts_B, returns_BR, old_values_BR, stats)
        self._optimizer.end_update()
        fit = _fit(old_values_BR[rows], returns_BR[rows], mask_BR=batch["response_mask"][rows])
        return stats.metrics() | fit | {names.CRITIC_LEARNING_RATE: lr}

    def save(self, folder: Path) -> None:
        """Save the model in the format of `transformers`, in full precision."""
        save_model(self.model, folder, weights=self._weights, process_group=self._process_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the critic besides the model: optimiser, warm-up and random state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._optimizer.load_state_dict(state)

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
        reduce = Aggregation.of_rows(
            batch["response_mask"],
            rows=rows,
            rollouts_B=rollouts_B,
            mode=config.loss_agg_mode,
            length=config.loss_length,
        )

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
        for _, (loss, clip_fraction) in add_gradients(
            loss_of, self._cut(batch, rows), into=self._weights, num_threads=self._num_threads
        ):
            sums[names.CRITIC_LOSS] += float(loss)
            sums[names.CRITIC_CLIP_FRACTION] += float(clip_fraction)
        totals = self._process_group.sum_metrics(sums)
        stats.add_step(totals, grad_norm=self._optimizer.step(loss=totals[names.CRITIC_LOSS]))

    def _cut(self, batch: RolloutBatch, rows: Tensor) -> Iterator[MicroBatch]:
        return micro_batches_of_rank(
            batch,
            rows=rows,
            process_group=self._process_group,
            max_tokens=self._config.max_tokens_per_micro_batch,
            device=self.model.device,
            use_packing=self._config.use_packing,
            share_prefixes=self._config.share_prefixes,
            pad=self._pads,
            at_least=self._num_threads,
        )


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
