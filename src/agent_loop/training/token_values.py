"""Values of tokens that the optimiser steps of an update compute. B rows of a batch, R response width."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup


class TokenValues:
    """Means over the epochs of an update of the values of each token. Single use.

    Args:
        shape: Shape [B, R] of the batch.
        process_group: Process group whose ranks compute shares of the rows.
    """

    def __init__(self, shape: torch.Size, *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        self._shape = shape
        self._process_group = process_group
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> None:
        """Add values by name, in the shape of the micro-batch. A spare micro-batch adds nothing."""
        is_sampled_BR = micro_batch.mask_BR.bool()
        for name, values_BR in values.items():
            sums_BR = self._sums.setdefault(name, torch.zeros(self._shape))
            if not micro_batch.is_spare:
                added_BR = torch.where(is_sampled_BR, values_BR.detach(), 0.0).to(sums_BR)
                sums_BR[micro_batch.rows_B.to(sums_BR.device), : added_BR.shape[1]] += added_BR

    def columns(self, rows: Tensor, *, num_epochs: int) -> dict[str, Tensor]:
        """Return the mean of each token over all epochs and ranks, [B, R] float32; NaN in other rows than these."""
        found: dict[str, Tensor] = {}
        for name, sums_BR in sorted(self._sums.items()):
            means_BR = self._process_group.sum_tensor(sums_BR) / num_epochs
            found[name] = torch.full_like(means_BR, torch.nan)
            found[name][rows] = means_BR[rows]
        return found
