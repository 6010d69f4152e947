"""A model that is trained: its passes over micro-batches, its optimiser, and the statistics of an update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import OptimConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.runtime.threads import run_in_threads
from agent_loop.storage.columns import Learned
from agent_loop.training import metrics as names
from agent_loop.training.forward import prepare_batching
from agent_loop.training.losses.terms import Aggregation, masked_difference
from agent_loop.training.master_weights import Gradients, save_model, take_weights
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.optimizer import Optimizer
from agent_loop.training.policy import make_exact
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup
from agent_loop.trajectory import Trajectory

ADVANTAGES = "advantages"
"""Column that the learner adds to its batch, float32 [B, R]."""
IS_TRAINED = "is_trained"
"""Column that the learner adds to its batch, bool [B]: rows that were trained."""
TRAIN_LOG_PROBS = "train_logprobs"
"""Column that the actor adds, float32 [B, R]: its log-probs before the update, NaN in rows without."""
COLUMNS = (ADVANTAGES, IS_TRAINED, TRAIN_LOG_PROBS)

ResultT = TypeVar("ResultT")


class TrainedModel:
    """A model that is trained, its master weights and its optimiser. Base of the actor and of the critic."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: OptimConfig,
        section: str,
        dtype: torch.dtype | None,
        seed: int,
        process_group: ProcessGroup,
        num_threads: int,
    ) -> None:
        """Take ownership of a loaded model. The arguments are those of the actor; `section` is that of `config`."""
        self.model = model
        self._batching = config
        make_exact(model, gradient_checkpointing=config.gradient_checkpointing)
        self._pads = prepare_batching(model, config=config, section=section)
        self._process_group = process_group
        self._num_threads = num_threads
        self._weights = take_weights(
            model, process_group=process_group, dtype=dtype, on_host=config.optimizer_on_host
        )
        self._optimizer = Optimizer(self._weights, config=config, seed=seed)

    @property
    def num_updates(self) -> int:
        return self._optimizer.num_updates

    def save(self, folder: Path) -> None:
        """Save the model in the format of `transformers`, in full precision."""
        save_model(self.model, folder, weights=self._weights, process_group=self._process_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state besides the model: optimiser, warm-up and random state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._optimizer.load_state_dict(state)

    def _compute(
        self,
        function: Callable[[MicroBatch], Tensor],
        batch: RolloutBatch,
        rows: Tensor,
        *,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the values of a function of micro-batches for these rows; [B, R] float32, 0 elsewhere."""
        values_BR = torch.zeros(batch["responses"].shape, dtype=torch.float32)
        with torch.no_grad():
            parts = self._cut(batch, rows, device=device)
            for micro_batch, part_BR in _compute_each(function, parts, num_threads=self._num_threads):
                micro_batch.put(part_BR, into=values_BR)
        return self._process_group.sum_tensor(values_BR)

    def _add_gradients(
        self, loss_of: Callable[[MicroBatch], tuple[Tensor, ResultT]], batch: RolloutBatch, rows: Tensor
    ) -> Iterator[tuple[MicroBatch, ResultT]]:
        """Add the gradient of each micro-batch to the weights, and yield the other result of `loss_of`, in order.

        With several threads, each needs memory for all gradients. The sums do not depend on their number, to the last
        bit.
        """
        parts = self._cut(batch, rows)
        if self._num_threads == 1:
            for micro_batch in parts:
                loss, found = loss_of(micro_batch)
                cast(Any, loss).backward()
                yield micro_batch, found
            return

        def differentiate(micro_batch: MicroBatch) -> tuple[Gradients, ResultT]:
            loss, found = loss_of(micro_batch)
            return self._weights.gradients_of(loss), found

        for micro_batch, (gradients, found) in _compute_each(
            differentiate, parts, num_threads=self._num_threads
        ):
            self._weights.add(gradients)
            yield micro_batch, found

    def _aggregation(self, batch: RolloutBatch, rows: Tensor, rollouts_B: Tensor) -> Aggregation:
        """Return the aggregation of a mini-batch."""
        return Aggregation.of_rows(
            batch["response_mask"],
            rows=rows,
            rollouts_B=rollouts_B,
            mode=self._batching.loss_agg_mode,
            length=self._batching.loss_length,
        )

    def _cut(
        self, batch: RolloutBatch, rows: Tensor, *, device: torch.device | None = None
    ) -> Iterator[MicroBatch]:
        return micro_batches(
            batch,
            rows=rows,
            process_group=self._process_group,
            max_tokens=self._batching.max_tokens_per_micro_batch,
            device=device or self.model.device,
            share_prefixes=self._batching.share_prefixes,
            pad=self._pads,
            at_least=self._num_threads,
        )


def _compute_each(
    function: Callable[[MicroBatch], ResultT], parts: Iterable[MicroBatch], *, num_threads: int
) -> Iterator[tuple[MicroBatch, ResultT]]:
    """Yield each micro-batch and the result of the function, in order."""
    has_gradient = torch.is_grad_enabled()

    def compute(micro_batch: MicroBatch) -> tuple[MicroBatch, ResultT]:
        if num_threads > 1:
            torch.set_num_threads(1)  # per thread, because the other threads use the other cores
        with torch.set_grad_enabled(has_gradient):
            return micro_batch, function(micro_batch)

    yield from (
        map(compute, parts) if num_threads == 1 else run_in_threads(compute, parts, num_threads=num_threads)
    )


class UpdateStats:
    """Statistics of the optimiser steps of one update, of the `actor` or the `critic`. Single use."""

    def __init__(self, section: str, *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        self.num_steps = 0
        self._process_group = process_group
        self._section = section
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._log_ratios: list[Tensor] = []

    def add_step(self, sums: Mapping[str, float], *, grad_norm: float) -> None:
        """Add an optimiser step, with the sums of all ranks."""
        self.num_steps += 1
        for name, value in {**sums, f"{self._section}/grad_norm": grad_norm}.items():
            self._values[name].append(value)

    def compare(self, logprobs_BR: Tensor, rollout_BR: Tensor | None, micro_batch: MicroBatch) -> None:
        """Add the log-ratios of trainer and engine. Call it while both have the same weights."""
        if rollout_BR is not None:
            mask_BR = micro_batch.mask_BR
            log_ratio_BR = masked_difference(logprobs_BR, micro_batch.cut(rollout_BR), mask_BT=mask_BR)
            self._log_ratios.append(log_ratio_BR[mask_BR.bool()].cpu())

    def metrics(self) -> dict[str, float]:
        """Return the means over the optimiser steps of all ranks, without values that are not finite."""
        metrics = {
            name: sum(finite) / len(finite)
            for name, values in self._values.items()
            if (finite := [value for value in values if math.isfinite(value)])
        }
        grad_norms = self._values[f"{self._section}/grad_norm"]
        num_nonfinite = sum(not math.isfinite(norm) for norm in grad_norms)
        metrics[f"{self._section}/nonfinite_updates"] = float(num_nonfinite)
        metrics[f"{self._section}/optimizer_steps"] = float(len(grad_norms) - num_nonfinite)
        log_ratios = [
            ratios_N for part in self._process_group.all_gather(self._log_ratios) for ratios_N in part
        ]
        if log_ratios:
            metrics |= _mismatch(torch.cat(log_ratios))
        return metrics


def _mismatch(log_ratios_N: Tensor) -> dict[str, float]:
    """Return metrics of the log-ratios of trainer to rollout. The rollout sampled, so `k1` is minus their mean."""
    differences_N = log_ratios_N.abs()
    return {
        names.LOGPROB_DIFF_MAX: float(differences_N.max()),
        names.LOGPROB_DIFF_MEAN: float(differences_N.mean()),
        names.MISMATCH_K1: float(-log_ratios_N.mean()),
        names.MISMATCH_K3: float((log_ratios_N.exp() - 1 - log_ratios_N).mean()),
    }


def learned_of(batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> list[Learned]:
    """Return the training results of each trajectory of a batch."""
    held = cast(Any, batch)
    advantages_BR, is_trained_B, logprobs_BR = (held.get(name, None) for name in COLUMNS)
    learned: list[Learned] = []
    for row, trajectory in enumerate(trajectories):
        num_tokens = len(trajectory.output.response_ids)
        logprobs = _row(logprobs_BR, row, num_tokens)
        is_known = logprobs is not None and not np.isnan(logprobs).any()
        is_trained = is_trained_B is not None and bool(is_trained_B[row])
        learned.append(
            Learned(
                advantages=_row(advantages_BR, row, num_tokens) if is_trained else None,
                train_logprobs=logprobs if is_known else None,
                trained_mask=np.asarray(batch["response_mask"][row, :num_tokens], dtype=bool),
            )
        )
    return learned


def _row(values_BR: Tensor | None, row: int, num_tokens: int) -> Any:
    return None if values_BR is None else np.asarray(values_BR[row, :num_tokens], dtype=np.float32)
