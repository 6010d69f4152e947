"""Settings of advantages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent_loop.config.values import (
    Coefficient,
    KLEstimator,
    Name,
    NotNegative,
    Section,
    Share,
    Tokens,
)
from agent_loop.types import StopReason


class AlgorithmConfig(Section):
    """Advantages."""

    adv_estimator: Name = "grpo"
    """Baseline of the advantages. `grpo` and `rloo`: the other trajectories of the group. `remax`: a greedy trajectory.
    `reinforce_plus_plus`: the whole batch. `reinforce_plus_plus_baseline`: the group, then the batch. `gae`: a
    critic. Or a name registered with `@advantage_estimator`, `file.py:name` or `module:name`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages of `grpo` by the group's standard deviation. False together with
    `actor.loss_agg_mode=seq-mean-token-sum-norm` is Dr. GRPO."""
    drop_zero_variance_groups: bool = True
    """Drop groups in which all trajectories have the same reward, if the estimator compares within groups."""
    max_refills: NotNegative = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): how often per step groups without variance are replaced by groups of
    other rows."""
    turn_reward_weight: Coefficient = 0.0
    """Weight of turn rewards (of a tool's `execute` or an interaction's score); 0 ignores them. `grpo` adds their
    weighted process advantage (DeepSeekMath, section 4.1.3) at each token. `rloo` and `remax` add their weighted sum to
    the trajectory's reward. The other estimators treat them as rewards of their tokens."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per sampled token (`reinforce_plus_plus`, `gae`)."""
    lam: Share = 1.0
    """Lambda of `gae`: 1 uses rewards alone, 0 the critic's next value."""
    whiten_advantages: bool = True
    """Whiten the advantages of `gae` over all trained tokens, as `reinforce_plus_plus` always does."""
    kl_reward_coef: Coefficient = 0.0
    """Weight of the KL penalty in the reward, against the policy at the start of the run."""
    kl_reward_type: KLEstimator = "k1"
    """Estimator of the KL penalty in the reward."""
    overlong_buffer: Tokens | None = None
    """Tokens before `rollout.response_length` in which the reward decreases with the length of the response (DAPO's
    soft overlong punishment)."""
    overlong_penalty: Coefficient = 1.0
    """Penalty of a response of full length."""
    untrained_stop_reasons: list[StopReason] = []
    """Stop reasons of trajectories that are not trained. Their rewards still count in their groups.
    `[response_length]` is DAPO's overlong filtering."""
