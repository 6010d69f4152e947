"""Settings of actor and critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from agent_loop.config.values import (
    AggregationMode,
    Beta,
    Coefficient,
    KLEstimator,
    LearningRate,
    Level,
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
    """Steps, from the first on, over which the learning rate decays linearly to `min_lr_share` of `lr`; None keeps
    it."""
    min_lr_share: Share = 0.1
    """Share of `lr` after `decay_steps`."""
    ppo_epochs: Positive = 1
    """Passes over the batch per step."""
    ppo_mini_batches: Positive = 1
    """Optimiser steps per pass."""
    max_tokens_per_micro_batch: Tokens = 16384
    """Maximum tokens in one forward and backward pass, padding included."""
    use_packing: bool = False
    """Put several short rows into one line of the input instead of padding each. A model that computes packed rows
    differently from single rows is refused at the start."""
    share_prefixes: bool = False
    """Compute common prefixes of rows, such as the prompt of a group, once; this packs rows too. A model that computes
    such rows differently from single rows is refused at the start. Rows longer than the model's windows need full
    attention."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum norm of the gradient."""
    loss_agg_mode: AggregationMode = "token-mean"
    """`token-mean`: every token has the same weight. `seq-mean-token-mean`: every trajectory has the same weight.
    `seq-mean-token-sum-norm`: the sum of a trajectory is divided by `loss_length` (Dr. GRPO)."""
    loss_length: Tokens | None = None
    """Divisor of `seq-mean-token-sum-norm`; None is `rollout.response_length`."""
    gradient_checkpointing: bool = False


class CorrectionConfig(Section):
    """Importance sampling between rollout and trainer."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """Multiply a token's loss by the ratio of both probabilities. `truncate` cuts the ratio at `max_ratio` (TIS).
    `mask` drops tokens beyond either bound (MIS)."""
    level: Level = "token"
    """Ratio of the token, or product of the ratios of its trajectory."""
    min_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Lower bound of `mask`."""
    max_ratio: Annotated[float, Field(gt=1, le=1e6)] = 2.0


class ActorConfig(OptimConfig):
    """Policy loss, optimiser and micro-batches of the policy."""

    policy_loss: Name = "ppo"
    """Ratio that is clipped. `ppo`: the ratio of each token. `gspo`: the geometric mean over the trajectory; use bounds
    around 0.0003 and `loss_agg_mode=seq-mean-token-mean`. Or a name registered with `@policy_loss`, `file.py:name` or
    `module:name`."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_ratio_high: Annotated[float, Field(gt=0, le=1e6)] = 0.28
    clip_ratio_c: Annotated[float, Field(gt=1, le=1e6)] | None = None
    """Bound of the dual clip: with a negative advantage, a larger ratio has no gradient; None is no bound."""
    old_log_probs: Literal["rollout", "recompute"] = "rollout"
    """Old log-probs of the ratio: those of the servers, or those that the trainer computes before its first optimiser
    step. The trainer computes them in any case if the servers return none."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance sampling between rollout and trainer. Needs `old_log_probs=recompute`."""
    kl_loss_coef: Coefficient = 0.0
    """Weight of the KL penalty in the loss, against the policy at the start of the run; 0 loads no reference model."""
    kl_loss_type: KLEstimator = "k3"
    """Estimator of the KL penalty in the loss. The gradient of `k1` is 0 in the mean, so use it to compare only."""
    entropy_coeff: Coefficient = 0.0

    @field_validator("correction")
    @classmethod
    def _needs_recomputed_logprobs(cls, value: CorrectionConfig, info: ValidationInfo) -> CorrectionConfig:
        if value.kind != "none" and info.data.get("old_log_probs") != "recompute":
            raise ValueError("it needs log-probs of the trainer; set actor.old_log_probs=recompute")
        return value


class CriticConfig(OptimConfig):
    """Critic of `algorithm.adv_estimator=gae`."""

    path: str = ""
    """Folder or hub name of a `transformers` model that gets a head of one value per token; empty is `model.path`."""
    lr: LearningRate = 1e-5
    clip_range_value: Annotated[float, Field(gt=0, le=1e6)] | None = 0.5
    """Largest change of a value in an update before the loss is clipped; None is no bound."""
    head_start: NotNegative = 0
    """First steps, in which only the critic is trained."""
