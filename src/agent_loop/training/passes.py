"""Passes of a model over micro-batches, and the statistics of the optimiser steps of an update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.runtime.threads import run_in_threads
from agent_loop.storage.columns import Learned
from agent_loop.training import metrics as names
from agent_loop.training.losses.terms import masked_difference
from agent_loop.training.master_weights import Gradients, MasterWeights
from agent_loop.training.micro_batches import MicroBatch
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


def compute_each(
    function: Callable[[MicroBatch], ResultT], micro_batches: Iterable[MicroBatch], *, num_threads: int
) -> Iterator[tuple[MicroBatch, ResultT]]:
    """Yield each micro-batch and the result of the function, in order."""
    if num_threads == 1:
        for micro_batch in micro_batches:
            yield micro_batch, function(micro_batch)
        return

    def compute(micro_batch: MicroBatch) -> tuple[MicroBatch, ResultT]:
        torch.set_num_threads(1)  # per thread, because the other threads use the other cores
        return micro_batch, function(micro_batch)

    yield from run_in_threads(compute, micro_batches, num_threads=num_threads)


def add_gradients(
    loss_of: Callable[[MicroBatch], tuple[Tensor, ResultT]],
    micro_batches: Iterable[MicroBatch],
    *,
    into: MasterWeights,
    num_threads: int,
) -> Iterator[tuple[MicroBatch, ResultT]]:
    """Add the gradient of each micro-batch to the weights, and yield the other result of `loss_of`, in order.

    Args:
        loss_of: Function that returns a micro-batch's part of the loss, and another result. It is called in the threads
            if there are several.
        micro_batches: The micro-batches.
        into: Weights of the model.
        num_threads: Number of micro-batches that are computed at once, each with memory for all gradients. The sums do
            not depend on it, to the last bit. Must be 1 if the weights are sharded.
    """
    if num_threads == 1:
        for micro_batch in micro_batches:
            loss, found = loss_of(micro_batch)
            cast(Any, loss).backward()
            yield micro_batch, found
        return

    def differentiate(micro_batch: MicroBatch) -> tuple[Gradients, ResultT]:
        loss, found = loss_of(micro_batch)
        return into.gradients_of(loss), found

    for micro_batch, (gradients, found) in compute_each(
        differentiate, micro_batches, num_threads=num_threads
    ):
        into.add(gradients)
        yield micro_batch, found


@dataclass(frozen=True, slots=True)
class StepNames:
    """Names of the metrics of optimiser steps."""

    grad_norm: str
    optimizer_steps: str
    nonfinite_updates: str


class UpdateStats:
    """Statistics of the optimiser steps of one update. Single use."""

    def __init__(self, step_names: StepNames, *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        self.num_steps = 0
        self._process_group = process_group
        self._names = step_names
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._log_ratios: list[Tensor] = []

    def add_step(self, sums: Mapping[str, float], *, grad_norm: float) -> None:
        """Add an optimiser step, with the sums of all ranks."""
        self.num_steps += 1
        for name, value in {**sums, self._names.grad_norm: grad_norm}.items():
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
        grad_norms = self._values[self._names.grad_norm]
        num_nonfinite = sum(not math.isfinite(norm) for norm in grad_norms)
        metrics[self._names.nonfinite_updates] = float(num_nonfinite)
        metrics[self._names.optimizer_steps] = float(len(grad_norms) - num_nonfinite)
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
