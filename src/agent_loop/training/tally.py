"""Collects the metrics of one update of the actor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from agent_loop.training import metrics as names
from agent_loop.training.micro_batches import MicroBatch


class UpdateTally:
    """Filled by one update, read once."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._differences: list[Tensor] = []

    def add_step(self, values: Mapping[str, float]) -> None:
        self.num_steps += 1
        for name, value in values.items():
            self._values[name].append(value)

    def compare(self, log_probs_BR: Tensor, rollout_BR: Tensor | None, micro_batch: MicroBatch) -> None:
        """How far trainer and engine are apart, as long as both have the same weights."""
        if rollout_BR is not None:
            difference_BR = (log_probs_BR - micro_batch.cut(rollout_BR)).abs()
            self._differences.append(difference_BR[micro_batch.mask_BR.bool()].cpu())

    def metrics(self) -> dict[str, float]:
        metrics = {
            name: sum(finite) / len(finite)
            for name, values in self._values.items()
            if (finite := [value for value in values if math.isfinite(value)])
        }
        grad_norms = self._values[names.GRAD_NORM]
        num_nonfinite = sum(not math.isfinite(norm) for norm in grad_norms)
        metrics[names.NONFINITE_UPDATES] = float(num_nonfinite)
        metrics[names.OPTIMIZER_STEPS] = float(len(grad_norms) - num_nonfinite)
        if self._differences:
            differences = torch.cat(self._differences)
            metrics[names.LOGPROB_DIFF_MAX] = float(differences.max())
            metrics[names.LOGPROB_DIFF_MEAN] = float(differences.mean())
        return metrics
