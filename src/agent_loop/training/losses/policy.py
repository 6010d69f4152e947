"""Losses of the policy: PPO, GSPO, CISPO, DPPO and SAPO, and calls of any policy loss. B rows, T response tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agent_loop.config import ActorConfig, Divergence, Level
from agent_loop.errors import AlgorithmError
from agent_loop.registries import RegisteredFunction
from agent_loop.training.losses.terms import masked_difference
from agent_loop.training.registry import POLICY_LOSSES, call, check_shape, policy_loss

RESERVED_METRICS = frozenset({"loss", "ppo_kl", "entropy", "kl_loss", "grad_norm", "lr"})
"""Metrics of the actor that a policy loss cannot return."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and metrics."""

    loss_BT: Tensor
    """With gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values of each token, [B, T], by metric name. They are aggregated like the loss and logged as `actor/NAME`."""


@policy_loss("ppo")
def ppo(logprobs_BT: Tensor, *, config: ActorConfig, **inputs: Tensor) -> TokenLoss:
    """Return PPO's clipped loss with one ratio per token (arXiv 1707.06347)."""
    return clipped_loss(logprobs_BT, **inputs, **_bounds(config))


@policy_loss("gspo")
def gspo(logprobs_BT: Tensor, *, config: ActorConfig, **inputs: Tensor) -> TokenLoss:
    """Return the clipped loss with one ratio per row and an advantage per token (GSPO-token, arXiv 2507.18071).

    If the advantages of a row are equal, this is GSPO.
    """
    return clipped_loss(logprobs_BT, **inputs, **_bounds(config), level="sequence")


def _bounds(config: ActorConfig) -> Any:
    return {name: getattr(config, name) for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}


def clipped_loss(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
    level: Level = "token",
) -> TokenLoss:
    """Return PPO's clipped loss (arXiv 1707.06347, equation 7), with separate bounds (arXiv 2503.14476).

    The loss is `-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)` with `ratio = exp(logprobs - old_logprobs)`. If
    the advantage is negative, the loss is at most `-c * A` (arXiv 1912.09729).

    Args:
        logprobs_BT: Log-probs under the policy that is trained, with gradient.
        old_logprobs_BT: Log-probs under the policy that sampled.
        advantages_BT: Advantages, or a tensor that broadcasts to [B, T].
        mask_BT: 1 for tokens to train on.
        clip_ratio_low: Clip ratios below 1 minus this.
        clip_ratio_high: Clip ratios above 1 plus this.
        clip_ratio_c: Bound of the dual clip; None is no bound.
        level: Use the ratio of each token, or that of the row as `sequence_log_ratio` computes it.

    Returns:
        The loss with the metrics `clip_fraction` and `dual_clip_fraction`: 1 for tokens whose gradient a clip removed.
    """
    log_ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT)
    used_BT = log_ratio_BT if level == "token" else sequence_log_ratio(log_ratio_BT, mask_BT=mask_BT)
    ratio_BT = used_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    plain_loss_BT, clipped_loss_BT = -advantages_BT * ratio_BT, -advantages_BT * clipped_BT
    loss_BT = torch.maximum(plain_loss_BT, clipped_loss_BT)
    metrics = {"clip_fraction": (clipped_loss_BT > plain_loss_BT).to(ratio_BT.dtype)}
    if clip_ratio_c is not None:
        bound_BT = -advantages_BT * clip_ratio_c
        is_bounded_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
        loss_BT = torch.where(is_bounded_BT, bound_BT, loss_BT)
        metrics["dual_clip_fraction"] = is_bounded_BT.to(ratio_BT.dtype)
    return TokenLoss(loss_BT, metrics)


def sequence_log_ratio(log_ratio_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Return the mean log-ratio of each row at each of its tokens, [B, T]: the ratio of GSPO (arXiv 2507.18071).

    Each token has the gradient of its own log-prob only (GSPO-token). If the advantages of a row are equal, the sum is
    GSPO's gradient.
    """
    lengths_B1 = mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    mean_B1 = (log_ratio_BT.sum(dim=-1, keepdim=True) / lengths_B1).detach()
    return mean_B1 + log_ratio_BT - log_ratio_BT.detach()


def load_policy_loss(reference: str) -> RegisteredFunction:
    """Return the policy loss that `actor.policy_loss` names."""
    example = "logprobs_BT, *, old_logprobs_BT, advantages_BT, mask_BT, config"
    return POLICY_LOSSES.load(reference, example=example)


def token_loss(
    loss: RegisteredFunction,
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: ActorConfig,
) -> TokenLoss:
    """Call a policy loss and check its result."""
    returned = call(
        loss,
        logprobs_BT,
        key=POLICY_LOSSES.key,
        old_logprobs_BT=old_logprobs_BT,
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        config=config,
    )
    result = returned if isinstance(returned, TokenLoss) else TokenLoss(returned)
    where = f"{POLICY_LOSSES.key}={loss.name} returned"
    for name, values_BT in {"a loss": result.loss_BT, **result.metrics}.items():
        check_shape(values_BT, [list(logprobs_BT.shape)], what=name, where=where)
    reserved = sorted(RESERVED_METRICS & set(result.metrics))
    if reserved:
        raise AlgorithmError(f"{where} the metric {reserved[0]!r}, which the actor computes; rename it")
    if logprobs_BT.requires_grad and not result.loss_BT.requires_grad:
        raise AlgorithmError(f"{where} a loss without a gradient; compute it from logprobs_BT")
    is_trained_BT = mask_BT.bool()
    is_bad_BT = is_trained_BT & ~result.loss_BT.isfinite()
    inputs = (logprobs_BT, old_logprobs_BT, advantages_BT)
    has_nan = any(bool((each_BT.isnan() & is_trained_BT).any()) for each_BT in inputs)
    if (
        is_bad_BT.any() and not has_nan
    ):  # a NaN comes of an update that diverged, and the loss is not at fault
        raise AlgorithmError(
            f"{where} a loss that is not finite at {int(is_bad_BT.sum())} trained tokens; return finite values "
            "(agent_loop.training.masked_difference bounds log-ratios)"
        )
    return result


@policy_loss("cispo")
def cispo(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: ActorConfig,
) -> TokenLoss:
    """Return CISPO's loss `-min(ratio, 1 + high) * A * logprobs` (MiniMax-M1, arXiv 2506.13585).

    The weight `min(ratio, 1 + high)` has no gradient, so every token has one. There is no lower bound, as in the runs
    of the paper.

    Returns:
        The loss with the metric `clip_fraction`: 1 for tokens whose weight was clipped.
    """
    log_ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT)
    ratio_BT = log_ratio_BT.detach().exp()
    weights_BT = ratio_BT.clamp(max=1 + config.clip_ratio_high)
    # The value is that of the log-prob; the gradient is that of the log-ratio, which has none where it is cut.
    value_BT = torch.where(logprobs_BT.isneginf(), 0.0, logprobs_BT).detach()
    own_logprobs_BT = value_BT + log_ratio_BT - log_ratio_BT.detach()
    return TokenLoss(
        -weights_BT * advantages_BT * own_logprobs_BT,
        {"clip_fraction": (ratio_BT > weights_BT).to(ratio_BT.dtype)},
    )


THRESHOLDS: dict[Divergence, float] = {"tv": 0.15, "kl": 0.05}
"""Thresholds of the paper."""


@policy_loss("dppo")
def dppo(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: ActorConfig,
) -> TokenLoss:
    """Return DPPO's loss `-keep * ratio * A` with a binary divergence (Qi et al., arXiv 2602.04879).

    `keep` is 0 for tokens whose divergence exceeds `dppo_threshold`, if the update would raise the divergence: if the
    advantage is positive and the ratio above 1, or the advantage negative and the ratio below 1. With `clip_ratio_c`
    the ratio is at most `c`. Such a token keeps its gradient, with weight `c`.

    Returns:
        The loss with the metric `clip_fraction`: 1 for tokens that are not kept.
    """
    log_ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT)
    divergence_BT = binary_divergence(
        logprobs_BT.detach(), old_logprobs_BT=old_logprobs_BT, mask_BT=mask_BT, kind=config.dppo_divergence
    )
    threshold = config.dppo_threshold or THRESHOLDS[config.dppo_divergence]
    moves_away_BT = advantages_BT * log_ratio_BT.detach() > 0
    is_dropped_BT = moves_away_BT & (divergence_BT > threshold)
    weights_BT = log_ratio_BT.detach().exp().clamp(max=config.clip_ratio_c or math.inf)
    surrogate_BT = weights_BT * (1 + log_ratio_BT - log_ratio_BT.detach())
    return TokenLoss(
        torch.where(is_dropped_BT, 0.0, -advantages_BT * surrogate_BT),
        {"clip_fraction": is_dropped_BT.to(log_ratio_BT.dtype)},
    )


def binary_divergence(
    logprobs_BT: Tensor, *, old_logprobs_BT: Tensor, mask_BT: Tensor, kind: Divergence
) -> Tensor:
    """Return the divergence of two distributions over two outcomes: the sampled token and any other token; [B, T].

    `tv` is the total variation `|p - p_old|`. `kl` is the KL divergence of the new distribution from the old one,
    `p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`. Both are lower bounds of the divergence over the
    vocabulary.
    """
    old_BT = old_logprobs_BT.exp()
    if kind == "tv":
        return (logprobs_BT.exp() - old_BT).abs()
    log_ratio_BT = masked_difference(old_logprobs_BT, logprobs_BT, mask_BT=mask_BT)
    other_log_ratio_BT = masked_difference(
        _log_complement(old_logprobs_BT), _log_complement(logprobs_BT), mask_BT=mask_BT
    )
    return old_BT * log_ratio_BT + (1 - old_BT) * other_log_ratio_BT


def _log_complement(logprobs_BT: Tensor) -> Tensor:
    """Return `log(1 - p)`, which is also exact where p is near 0 or 1."""
    return (-torch.expm1(logprobs_BT)).log()


@policy_loss("sapo")
def sapo(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: ActorConfig,
) -> TokenLoss:
    """Return SAPO's loss `-4 / tau * sigmoid(tau * (ratio - 1)) * A` (Gao et al., arXiv 2511.20347).

    `tau` is `tau_pos` if the advantage is positive, else `tau_neg`. At a ratio of 1 the gradient is that of the ratio.
    It decreases smoothly on both sides, faster for a larger `tau`.
    """
    ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT).exp()
    tau_BT = torch.full_like(ratio_BT, config.tau_neg).masked_fill(advantages_BT > 0, config.tau_pos)
    return TokenLoss(-4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * advantages_BT)
