"""Metrics of one update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.training import metrics as names
from agent_loop.training.losses import masked_difference
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup


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
