"""Losses of the Tinker API. Each is a sum over the tokens of all data, without a mean.

B rows, R positions, K targets of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agent_loop.errors import AlgorithmError

TARGETS = "target_tokens"
"""Input of every loss: token ids, whose log-probs the loss is computed from."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss function with its settings."""

    name: str
    settings: Mapping[str, float]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the loss takes besides the targets."""
        return _LOSSES[self.name].inputs

    def __call__(self, logprobs_BRK: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of the loss, with gradient. Inputs are 0 at padding."""
        return _LOSSES[self.name].function(logprobs_BRK, **inputs, **self.settings).sum()


def load_loss(name: str, settings: Mapping[str, float | str]) -> Loss:
    """Return a loss with its settings, and defaults for those that are not given."""
    if name in _REFUSED:
        raise AlgorithmError(f"loss_fn is {name!r}, {_REFUSED[name]}")
    if name not in _LOSSES:
        raise AlgorithmError(f"loss_fn is {name!r}; this server has {', '.join(_LOSSES)}")
    known = _LOSSES[name].settings
    numbers: dict[str, float] = {}
    for key, value in settings.items():
        if key not in known or isinstance(value, str):
            raise AlgorithmError(
                f"loss_fn_config of {name} has {key}={value!r}; it takes {', '.join(known) or 'nothing'}"
            )
        numbers[key] = value
    return Loss(name, {**known, **numbers})


def cross_entropy(logprobs_BRK: Tensor, *, weights: Tensor) -> Tensor:
    """Return the weighted negative log-probs."""
    return -logprobs_BRK * weights


def importance_sampling(logprobs_BRK: Tensor, *, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the policy gradient with the ratio to the policy that sampled."""
    return -_ratio(logprobs_BRK, logprobs, advantages) * advantages


def ppo(
    logprobs_BRK: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    """Return PPO's clipped loss (arXiv 1707.06347, equation 7)."""
    ratio = _ratio(logprobs_BRK, logprobs, advantages)
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(
    logprobs_BRK: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    """Return the policy gradient with a clipped ratio that has no gradient (arXiv 2506.13585, equation 4)."""
    ratio = _ratio(logprobs_BRK, logprobs, advantages).detach()
    return -ratio.clamp(clip_low_threshold, clip_high_threshold) * logprobs_BRK * advantages


def dro(logprobs_BRK: Tensor, *, logprobs: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """Return the policy gradient with a quadratic penalty of the log-ratio (arXiv 2405.19107)."""
    return -(logprobs_BRK * advantages - 0.5 * beta * (logprobs_BRK - logprobs) ** 2)


def _ratio(logprobs_BRK: Tensor, old_BRK: Tensor, advantages: Tensor) -> Tensor:
    """Return the ratio of probabilities; 1 without an advantage, because that of a prompt token may overflow."""
    return torch.where(advantages == 0, 0.0, logprobs_BRK - old_BRK).exp()


@dataclass(frozen=True, slots=True)
class _Entry:
    function: Callable[..., Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    settings: Mapping[str, float] = field(default_factory=dict[str, float])


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_LOSSES = {
    "cross_entropy": _Entry(cross_entropy, inputs=("weights",)),
    "importance_sampling": _Entry(importance_sampling),
    "ppo": _Entry(ppo, settings=_CLIP),
    "cispo": _Entry(cispo, settings=_CLIP),
    "dro": _Entry(dro, settings={"beta": 0.05}),
}
_REFUSED = {
    "stable_reinforce": "which has no published formula, so this server does not have it; run the recipe with "
    "loss_fn=importance_sampling (or ppo, cispo)",
    "gspo": "which this server does not have; run the recipe with loss_fn=importance_sampling (or ppo, cispo)",
    "custom": "which the SDK computes on the client; create the client with the settings of this server",
}
