"""Settings of advantages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agent_loop.config.validation import parse_section
from agent_loop.config.values import (
    Coefficient,
    KLEstimator,
    Name,
    NotNegative,
    Positive,
    Samples,
    Section,
    Share,
    Tokens,
)
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.types import StopReason

OUTCOME = "reward"
"""Name in `reward_parts` for the trajectory's reward."""

SOURCE_SETTINGS = (
    "adv_estimator",
    "norm_adv_by_std_in_grpo",
    "drop_zero_variance_groups",
    "turn_reward_weight",
    "reward_parts",
    "gamma",
    "lam",
    "step_advantage_weight",
    "anchor_state",
    "whiten_advantages",
    "overlong_buffer",
    "overlong_penalty",
)
"""Settings that `by_data_source` can change."""

Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class ForkConfig(Section):
    """Continuations that `adv_estimator: fork` samples from states in the middle of trajectories."""

    continuations: Samples = 2
    """Continuations of each state. The mean of their rewards is the value of the state."""
    choice: Literal["uncertain", "every"] = "uncertain"
    """Turns before which trajectories are continued anew: those with the lowest mean log-prob, or each `every`-th
    turn."""
    max_turns: Positive = 1
    """Number of turns per trajectory that `uncertain` chooses."""
    every: Positive = 1
    """Number of turns between two states that `every` chooses."""
    both_sides: bool = False
    """Also continue from the state after each chosen turn."""
    train: bool = True
    """Train the tokens of the continuations too. False uses their rewards alone."""


class AlgorithmConfig(Section):
    """Advantages."""

    adv_estimator: Name = "grpo"
    """`grpo`, `rloo`, `remax`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`, `turn_grpo`, `gigpo`,
    `fork`, `gae`; or a name registered with `@advantage_estimator`, `file.py:name` or `module:name`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages of `grpo`, `turn_grpo` and `gigpo` by the standard deviation of what they compare."""
    drop_zero_variance_groups: bool = True
    """Drop groups in which all rewards are equal, if the estimator compares within groups."""
    max_refills: NotNegative = 0
    """How often per step groups without variance are replaced by groups of other rows (DAPO's dynamic sampling)."""
    turn_reward_weight: Coefficient = 0.0
    """Weight of turn rewards (of a tool's `execute` or an interaction's score); 0 ignores them."""
    reward_parts: dict[str, Weight] = {}
    """Weights of the parts of a reward for `gdpo`, such as `{correct: 1, format: 0.2}`."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per sampled token (`reinforce_plus_plus`, `gae`) or per turn (`turn_grpo`, `gigpo`)."""
    lam: Share = 1.0
    """Lambda of `gae`: 1 uses rewards alone, 0 the critic's next value."""
    step_advantage_weight: Coefficient = 1.0
    """Weight in `gigpo` of the comparison of turns in the same state."""
    anchor_state: Name | None = None
    """Key in `Feedback.extra` of the state after a turn, for `gigpo`. None compares the observation."""
    fork: ForkConfig = ForkConfig()
    """Continuations of `adv_estimator: fork`."""
    whiten_advantages: bool = True
    """Whiten the advantages of `gae` over all trained tokens, as `reinforce_plus_plus` always does."""
    kl_reward_coef: Coefficient = 0.0
    """Weight of the KL penalty in the reward, against the policy at the start of the run."""
    kl_reward_type: KLEstimator = "k1"
    """Estimator of the KL penalty in the reward."""
    overlong_buffer: Tokens | None = None
    """Tokens before `rollout.response_length` in which the reward decreases with the length of the response (DAPO)."""
    overlong_penalty: Coefficient = 1.0
    """Penalty of a response of full length."""
    untrained_stop_reasons: list[StopReason] = []
    """Stop reasons of trajectories that are not trained. Their rewards still count in their groups."""
    by_data_source: dict[str, dict[str, Any]] = {}
    """Other settings of this section for rows whose column `data_source` has a value, such as `{gsm8k: {adv_estimator:
    rloo}}`."""

    def of_source(self, source: str | None) -> AlgorithmConfig:
        """Return the settings for the rows of a data source; None is a row without one."""
        changes = self.by_data_source.get(source, {}) if source is not None else {}
        where = f"algorithm.by_data_source.{source}"
        for name in changes:
            if name not in SOURCE_SETTINGS:
                raise ConfigError(
                    f"{where} has the setting {name!r}, which a source cannot change"
                    f"{did_you_mean(name, SOURCE_SETTINGS)}"
                )
        run = self.model_dump(exclude={"by_data_source"})
        return parse_section(AlgorithmConfig, {**run, **changes}, where=where) if changes else self

    @model_validator(mode="after")
    def _has_parts_for_gdpo(self) -> AlgorithmConfig:
        if self.adv_estimator != "gdpo":
            return self
        if not self.reward_parts:
            raise ConfigError(
                "algorithm.adv_estimator is gdpo, which compares the parts of a reward, and algorithm.reward_parts is "
                "empty; name the parts with their weights, such as {correct: 1, format: 0.2}"
            )
        if OUTCOME not in self.reward_parts and (
            self.kl_reward_coef or self.turn_reward_weight or self.overlong_buffer is not None
        ):
            raise ConfigError(
                "algorithm.adv_estimator is gdpo, and kl_reward_coef, turn_reward_weight and overlong_buffer change "
                f"the trajectory's reward, which is not among algorithm.reward_parts; add {OUTCOME!r} to it"
            )
        return self

    @model_validator(mode="after")
    def _has_valid_sources(self) -> AlgorithmConfig:
        for source in self.by_data_source:
            self.of_source(source)
        return self
