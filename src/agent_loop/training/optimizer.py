"""Optimiser steps: mini-batches, learning rate, and skipped steps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agent_loop.config import OptimConfig
from agent_loop.errors import ConfigError
from agent_loop.training.master_weights import MasterWeights, whole


class Optimizer:
    """AdamW with a warm-up and a decay, and with 32 or 8 bits for each number of its state."""

    def __init__(self, weights: MasterWeights, *, config: OptimConfig, seed: int) -> None:
        """Refer to the weights."""
        self.num_updates = 0
        self.lr = config.lr
        """Learning rate of the last update that was started."""
        self._config = config
        self._grad_clip = config.grad_clip
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = weights
        settings = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
        self._adamw = _CLASSES[config.optimizer_bits](list(weights.tensors.values()), **settings)

    def set(self, *, grad_clip: float, **settings: Any) -> None:
        """Use other settings from now on: the maximum norm, and AdamW's `lr`, `betas`, `eps` and `weight_decay`."""
        self._grad_clip = grad_clip
        for group in self._adamw.param_groups:
            group.update(settings)

    def start_update(self) -> float:
        """Set the learning rate of this update and return it."""
        config = self._config
        share = min(1.0, (self.num_updates + 1) / max(1, config.warmup_steps))
        if config.decay_steps is not None:
            share *= 1 - min(1.0, self.num_updates / config.decay_steps) * (1 - config.min_lr_share)
        self.lr = config.lr * share
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        return self.lr

    def end_update(self) -> None:
        self.num_updates += 1

    def mini_batches(self, rows: Tensor, *, rollouts_B: Tensor | None = None) -> Iterator[Tensor]:
        """Shuffle the rollouts, divide them into mini-batches, and yield the rows of each, once per epoch."""
        rollouts = torch.arange(len(rows)) if rollouts_B is None else rollouts_B[rows]
        found: tuple[Tensor, Tensor] = cast(Any, torch).unique(rollouts, return_inverse=True)
        num_rollouts, numbers = len(found[0]), found[1]
        for _ in range(self._config.ppo_epochs):
            order = torch.randperm(num_rollouts, generator=self._generator)
            places = order.argsort()[numbers]
            for part in torch.arange(num_rollouts).tensor_split(
                min(self._config.ppo_mini_batches, num_rollouts)
            ):
                is_in = (places >= part[0]) & (places <= part[-1])
                yield rows[is_in][places[is_in].argsort(stable=True)]

    def step(self, *, loss: float) -> float:
        """Take one step with the current gradients, clear them, and return their norm before clipping.

        If the loss on all ranks or the norm is not finite, the step is skipped, and the returned norm is not finite.
        The loss is needed because the gradient of a NaN can be 0.
        """
        weights = list(self._weights.tensors.values())
        grad_norm = float(whole(torch.nn.utils.clip_grad_norm_(weights, self._grad_clip)))
        if not math.isfinite(loss):
            grad_norm = math.nan
        if math.isfinite(grad_norm):
            cast(Any, self._adamw).step()
            self._weights.copy_to_model()
        self._adamw.zero_grad()
        return grad_norm

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state by the names of the weights, the number of updates, and the random state."""
        adamw = {name: dict(self._adamw.state[weight]) for name, weight in self._weights.tensors.items()}
        return {
            "adamw": adamw,
            "num_updates": torch.tensor(self.num_updates),
            "generator": self._generator.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for name, weight in self._weights.tensors.items():
            own, saved = self._adamw.state[weight], state["adamw"][name]
            for key, value in own.items():
                if isinstance(value, Tensor):
                    value.copy_(saved[key])
                else:
                    own[key] = saved[key]
        self.num_updates = int(state["num_updates"])
        self._generator.set_state(state["generator"])


def _adamw(weights: list[Tensor], **settings: Any) -> torch.optim.Optimizer:
    adamw = torch.optim.AdamW(
        weights, fused=True, **settings
    )  # one pass, without temporaries of a weight's size
    for weight in weights:  # AdamW does the same in its first step
        adamw.state[weight] = {
            "step": torch.zeros((), device=weight.device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return adamw


def _adamw_8_bits(weights: list[Tensor], **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW with 8 bits for each number of its state (arXiv 2110.02861)."""
    try:
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError('optimizer_bits=8 needs: pip install "agent-loop[bitsandbytes]"') from error
    if any(isinstance(weight, DTensor) for weight in weights):
        raise ConfigError(
            "optimizer_bits is 8, but the weights are sharded over several processes; set optimizer_bits=32 or "
            "trainer.num_processes=1"
        )
    adamw: Any = bitsandbytes.optim.AdamW8bit(weights, **settings)
    for number, weight in enumerate(weights):  # AdamW8bit does the same in its first step
        adamw.init_state(adamw.param_groups[0], weight, 0, number)
    return adamw


_CLASSES = {32: _adamw, 8: _adamw_8_bits}
