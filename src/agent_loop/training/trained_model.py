"""A model that is trained: forward and backward passes over micro-batches, optimiser steps, and its weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import OptimConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.servers.embedded.weights import to_file_weights
from agent_loop.training.adapters import AdaptedModel, are_low_rank, merged_parameters, own_buffers
from agent_loop.training.advantages.groups import rollouts_of_rows
from agent_loop.training.forward import layout_of, prepare_layout
from agent_loop.training.losses.terms import Aggregation
from agent_loop.training.master_weights import save_model, take_weights
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.optimizer import Optimizer
from agent_loop.training.policy import make_exact
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup

LossFunction: TypeAlias = Callable[[MicroBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""Returns the loss of a micro-batch with a gradient, and values by name. Both are parts of sums over a mini-batch."""


class TrainedModel:
    """A model that is trained, its master weights and its optimiser. Base of the actor and of the critic.

    `forward_backward` adds the gradients of a loss, and the `optimizer` applies them. Call one method at a time, from
    any thread. In a process group, all ranks make the same calls.
    """

    section: ClassVar[str] = "actor"
    """Prefix of the metrics."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: OptimConfig,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Take ownership of a loaded model, which stays on its device.

        It computes in `dtype`; None is the dtype of its parameters. `seed` is that of the shuffle into mini-batches.
        """
        self.model = model
        self.process_group = process_group
        self._optim_config = config
        self._dtype = dtype or model.dtype
        make_exact(model, gradient_checkpointing=config.gradient_checkpointing)
        prepare_layout(model, config=config)
        self._weights = take_weights(
            model, process_group=process_group, dtype=dtype, on_host=config.optimizer_on_host
        )
        self.optimizer = Optimizer(self._weights, config=config, seed=seed)
        self._adapted = (
            AdaptedModel(model, dtype=self._dtype, process_group=process_group)
            if are_low_rank(model)
            else None
        )

    def compute(
        self,
        function: Callable[[MicroBatch], Tensor],
        batch: RolloutBatch,
        rows: Tensor,
        *,
        model: PreTrainedModel | None = None,
    ) -> Tensor:
        """Return the values of a function of micro-batches for these rows; [B, R] float32, 0 elsewhere.

        `model` is the model that the function calls; None is this one.
        """
        values_BR = torch.zeros(batch["responses"].shape, dtype=torch.float32)
        with torch.no_grad():
            for micro_batch in self._micro_batches(batch, rows, model or self.model):
                micro_batch.put(function(micro_batch), into=values_BR)
        return self.process_group.sum_tensor(values_BR)

    def forward_backward(self, batch: RolloutBatch, rows: Tensor, loss_of: LossFunction) -> dict[str, float]:
        """Add the gradients of a loss over these rows, and return the sums of the values that `loss_of` returns."""
        sums: defaultdict[str, float] = defaultdict(float)
        for micro_batch in self._micro_batches(batch, rows, self.model):
            loss, values = loss_of(micro_batch)
            cast(Any, loss).backward()
            for name, value in values.items():
                sums[name] += float(value)
        return self.process_group.sum_metrics(sums)

    def mini_batches(self, batch: RolloutBatch, rows: Tensor) -> Iterator[Tensor]:
        """Yield the rows of each optimiser step of one update, `ppo_mini_batches` in each of `ppo_epochs` passes."""
        self.optimizer.start_update()
        yield from self.optimizer.mini_batches(rows, rollouts_B=rollouts_of_rows(batch))
        self.optimizer.end_update()

    def aggregation(self, batch: RolloutBatch, rows: Tensor) -> Aggregation:
        """Return the aggregation of the losses of a mini-batch."""
        return Aggregation.of_rows(
            batch["response_mask"],
            rows=rows,
            rollouts_B=rollouts_of_rows(batch),
            mode=self._optim_config.loss_agg_mode,
            length=self._optim_config.loss_length,
        )

    def step(self, batch: RolloutBatch, rows: Tensor, loss_of: LossFunction) -> dict[str, float]:
        """Take one optimiser step, and return the sums of the values of `loss_of`, one of which is the loss."""
        sums = self.forward_backward(batch, rows, loss_of)
        return sums | {f"{self.section}/grad_norm": self.optimizer.step(loss=sums[f"{self.section}/loss"])}

    def mean_metrics(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the means over the optimiser steps of an update, without values that are not finite."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        for name, value in (item for step in steps for item in step.items()):
            if math.isfinite(value):
                values[name].append(value)
        num_finite = len(values[f"{self.section}/grad_norm"])
        return {name: sum(finite) / len(finite) for name, finite in values.items() if finite} | {
            f"{self.section}/optimizer_steps": float(num_finite),
            f"{self.section}/nonfinite_updates": float(len(steps) - num_finite),
            f"{self.section}/lr": self.optimizer.lr,
        }

    @property
    def trains_factors_alone(self) -> bool:
        """Whether only low-rank adapters are trained."""
        return self._adapted is not None

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return all weights by the names of the model's state dict, tied weights once, with adapters merged.

        Their dtype is the one that the model computes in. If `trains_factors_alone`, the result is `AdaptedWeights`.
        Otherwise, weights without an adapter that are not sharded share the model's memory: read them before the next
        update.
        """
        if self._adapted is not None:
            return self._adapted.weights()
        parameters = ((name, value.to(self._dtype)) for name, value in merged_parameters(self.model))
        return chain(parameters, to_file_weights(self.model, own_buffers(self.model)))

    def save(self, folder: Path) -> None:
        """Save the model in the format of `transformers`, in full precision."""
        save_model(self.model, folder, weights=self._weights, process_group=self.process_group)

    def _micro_batches(
        self, batch: RolloutBatch, rows: Tensor, model: PreTrainedModel
    ) -> Iterator[MicroBatch]:
        return micro_batches(
            batch,
            rows=rows,
            max_tokens=self._optim_config.max_tokens_per_micro_batch,
            device=model.device,
            layout=layout_of(model),
            process_group=self.process_group,
        )
