"""Steps of gradient descent: which rows make one, how large it is, and which is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from agent_loop.config import OptimConfig


class Optimizer:
    """AdamW with a warm-up over the parameters of a model that want a gradient."""

    def __init__(self, model: nn.Module, *, config: OptimConfig, seed: int) -> None:
        """Holds the parameters by reference.

        Args:
            model: Its parameters must be where they stay.
            config: Rates, and how many steps an update has.
            seed: Decides how rows are dealt into mini-batches.
        """
        self.num_updates = 0
        self._config = config
        self._generator = torch.Generator().manual_seed(seed)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    def start_update(self) -> float:
        """Returns the learning rate of this update."""
        share = min(1.0, (self.num_updates + 1) / max(1, self._config.warmup_steps))
        for group in self._adamw.param_groups:
            group["lr"] = self._config.lr * share
        return self._config.lr * share

    def end_update(self) -> None:
        self.num_updates += 1

    def mini_batches(self, rows: Tensor) -> Iterator[Tensor]:
        """The rows, shuffled and dealt into mini-batches, once per epoch."""
        for _ in range(self._config.ppo_epochs):
            shuffled = rows[torch.randperm(len(rows), generator=self._generator)]
            yield from shuffled.tensor_split(min(self._config.ppo_mini_batches, len(rows)))

    def step(self) -> float:
        """One step by the gradients at hand, which are gone after it; returns their norm before clipping.

        A norm that is not finite moves nothing.
        """
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        if math.isfinite(grad_norm):
            cast(Any, self._adamw).step()
        self._adamw.zero_grad()
        return grad_norm

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, the warm-up's, and the random state."""
        return {
            "optimizer": self._adamw.state_dict(),
            "num_updates": self.num_updates,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._adamw.load_state_dict(state["optimizer"])
        self.num_updates = int(state["num_updates"])
        self._generator.set_state(state["generator"])
