"""Settings of actor and critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from agent_loop.config.values import (
    AggregationMode,
    Beta,
    Coefficient,
    Divergence,
    KLEstimator,
    LearningRate,
    Name,
    NotNegative,
    Positive,
    Section,
    Share,
    Tokens,
)


class OptimConfig(Section):
    """Optimiser and micro-batches."""

    lr: LearningRate = 1e-6
    weight_decay: Coefficient = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises to `lr`."""
    decay_steps: Positive | None = None
    """Steps over which the learning rate decays linearly to `min_lr_share` of `lr`; None keeps it."""
    min_lr_share: Share = 0.1
    """Share of `lr` after `decay_steps`."""
    ppo_epochs: Positive = 1
    """Passes over the batch per step."""
    ppo_mini_batches: Positive = 1
    """Optimiser steps per pass."""
    max_tokens_per_micro_batch: Tokens = 16384
    """Maximum tokens in one forward and backward pass, padding included."""
    share_prefixes: bool = True
    """Compute each distinct token of a micro-batch once, on the prefix tree of its rows. Types of models that do not
    allow it are padded."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum norm of the gradient."""
    loss_agg_mode: AggregationMode = "token-mean"
    """`token-mean`: every token has the same weight. `seq-mean-token-mean`: every rollout has the same weight.
    `seq-mean-token-sum-norm`: the sum of a rollout is divided by `loss_length` (Dr. GRPO)."""
    loss_length: Tokens | None = None
    """Divisor of `seq-mean-token-sum-norm`; None is `rollout.response_length`."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Compute each layer again in the backward pass instead of keeping its activations. `selective` keeps the outputs
    of attention."""
    optimizer_bits: Literal[32, 8] = 32
    """Bits of each of the optimiser's two numbers per weight. 8 needs `bitsandbytes` and a single process."""
    optimizer_on_host: bool = False
    """Keep the optimiser and the gradients in CPU memory, and compute its steps there. One process only."""


class CorrectionConfig(Section):
    """Importance sampling between rollout and trainer."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """`truncate` cuts the importance weight of a token at `max_ratio` (TIS). `mask` drops tokens beyond either bound
    (MIS)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of the token, of its trajectory (`sequence`, the product), or the geometric mean over its trajectory."""
    min_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Lower bound of `mask`."""
    max_ratio: Annotated[float, Field(gt=1, le=1e6)] = 2.0


class ActorConfig(OptimConfig):
    """Policy loss, optimiser and micro-batches of the policy."""

    policy_loss: Name = "ppo"
    """`ppo`, `gspo`, `cispo`, `dppo`, `sapo`; or a name registered with `@policy_loss`, `file.py:name` or
    `module:name`."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clip ratios below 1 minus this, in `ppo` and `gspo`."""
    clip_ratio_high: Annotated[float, Field(gt=0, le=1e6)] = 0.28
    """Clip ratios above 1 plus this, in `ppo`, `gspo` and `cispo`."""
    clip_ratio_c: Annotated[float, Field(gt=1, le=1e6)] | None = None
    """Dual clip of `ppo` and `gspo`: with a negative advantage, a larger ratio has no gradient. In `dppo`, the largest
    weight of a token."""
    dppo_divergence: Divergence = "tv"
    """Divergence that `dppo` bounds: total variation or KL."""
    dppo_threshold: Annotated[float, Field(gt=0, le=100)] | None = None
    """Largest divergence in `dppo`; None is 0.15 for `tv` and 0.05 for `kl`."""
    tau_pos: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    """Temperature of the gate in `sapo` for positive advantages."""
    tau_neg: Annotated[float, Field(gt=0, le=1e3)] = 1.05
    """Temperature of the gate in `sapo` for negative advantages."""
    old_log_probs: Literal["rollout", "recompute"] = "rollout"
    """Old log-probs of the ratio: those of the servers, or those that the trainer computes before its first optimiser
    step."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance sampling between rollout and trainer. Needs `old_log_probs=recompute`."""
    kl_loss_coef: Coefficient = 0.0
    """Weight of the KL penalty in the loss, against the reference model; 0 loads no reference model."""
    reference_path: Name | None = None
    """Folder or hub name of the reference model, which needs the policy's vocabulary; None is `model.path`."""
    kl_loss_type: KLEstimator = "k3"
    """Estimator of the KL penalty in the loss. The mean gradient of `k1` is 0."""
    entropy_coeff: Coefficient = 0.0
    observation_coeff: Coefficient = 0.0
    """Weight of the cross-entropy of observations in the loss (ECHO)."""

    @field_validator("correction")
    @classmethod
    def _needs_recomputed_logprobs(cls, value: CorrectionConfig, info: ValidationInfo) -> CorrectionConfig:
        if value.kind != "none" and info.data.get("old_log_probs") != "recompute":
            raise ValueError("it needs log-probs of the trainer; set actor.old_log_probs=recompute")
        return value


class CriticConfig(OptimConfig):
    """Critic of `algorithm.adv_estimator=gae`."""

    path: str = ""
    """Folder or hub name of a `transformers` model that gets a value head; empty is `model.path`."""
    lr: LearningRate = 1e-5
    clip_range_value: Annotated[float, Field(gt=0, le=1e6)] | None = 0.5
    """Largest change of a value before its loss is clipped; None is no bound."""
    head_start: NotNegative = 0
    """First steps, in which only the critic is trained."""
