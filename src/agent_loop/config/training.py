"""Settings of training: advantages, losses and optimisers, distillation, supervised training."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agent_loop.config.validation import parse_section
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
    PositiveSeconds,
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


Objective: TypeAlias = Literal["forward_kl", "reverse_kl", "sampled_kl", "reward"]

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
"""Name of a teacher. It names metrics too."""


class TeacherConfig(Section):
    """A model on a server of its own that scores the tokens of trajectories. It needs the policy's vocabulary."""

    path: str = ""
    """Folder or hub name of the model; empty is `model.path`, the policy at the start of the run. With `server_url`,
    the name of the model at the server."""
    tokenizer_path: str | None = None
    """Folder or hub name of the teacher's tokenizer, to compare its vocabulary with the policy's; None is `path`."""
    engine: str = "embedded"
    """Engine of the server, as in `rollout.engine`. With `server_url`: `vllm`, `sglang` or `openai`."""
    engine_kwargs: dict[str, Any] = {}
    """Options of the engine, under its own names."""
    server_url: str | None = None
    """URL of a running server of this engine, such as `http://host:8000`. None starts a server."""
    sources: list[str] = []
    """Values of the column `data_source` whose rows it teaches. Empty: all rows whose source no other teacher names."""
    hint: str | None = None
    """Text that the teacher sees before the last user message of the prompt, and the policy does not."""
    hint_key: str | None = None
    """Column of the rows, such as a solution, whose text follows the hint."""
    context_length: Tokens | None = None
    """Most tokens of a text that the teacher scores; longer trajectories are not taught. None is
    `rollout.prompt_length` + `rollout.response_length`, and 1024 more with a hint."""
    max_concurrent: Positive = 16
    """Maximum number of concurrent requests to the teacher."""
    timeout_s: PositiveSeconds = 600.0
    """Time limit of a request. A trajectory whose request fails is not taught."""


class DistillationConfig(Section):
    """Distillation from teachers on the policy's own trajectories."""

    teachers: dict[TeacherName, TeacherConfig] = Field(default={})
    """Teachers by name, each with `path`, `tokenizer_path`, `engine`, `engine_kwargs`, `server_url`, `sources`, `hint`,
    `hint_key`, `context_length`, `max_concurrent` and `timeout_s`."""
    objective: Objective = "forward_kl"
    """`forward_kl`, `reverse_kl` or `sampled_kl` in the loss, or `reward` in the advantage."""
    top_k: Annotated[int, Field(ge=1, le=2**20)] = 64
    """Number of the teacher's likeliest tokens that `forward_kl` and `reverse_kl` compare. All other tokens count as
    one."""
    coef: Coefficient = 1.0
    """Weight of the teachers' objective."""
    reward_coef: Coefficient = 1.0
    """Factor of the advantages from rewards; with 0, the policy learns from the teachers alone."""

    @property
    def num_candidates(self) -> int:
        """Number of likeliest tokens that teachers are asked for."""
        return self.top_k if self.objective in ("forward_kl", "reverse_kl") else 0

    @model_validator(mode="after")
    def _has_one_teacher_for_each_source(self) -> DistillationConfig:
        counts = Counter(source for teacher in self.teachers.values() for source in set(teacher.sources))
        for source, count in counts.items():
            if count > 1:
                raise ConfigError(
                    f"{count} of distillation.teachers teach the source {source!r}; give each source one teacher"
                )
        others = [name for name, teacher in self.teachers.items() if not teacher.sources]
        if len(others) > 1:
            raise ConfigError(
                f"distillation.teachers.{others[0]} and {others[1]} both teach all sources; name the sources of one"
            )
        return self


class SftConfig(Section):
    """Supervised training on complete conversations: `agent-loop sft`, or steps between those of `agent-loop train`."""

    files: list[str] = []
    """Conversations in any format of `data.train_files`; or folders of runs and Parquet files of trajectories."""
    val_files: list[str] = []
    """Conversations on which `agent-loop sft` measures the loss every `trainer.val_every` steps."""
    messages_key: str = "messages"
    """Column with the messages, in the OpenAI form. An assistant message with `weight: 0` is not trained."""
    tools_key: str = "tools"
    """Column with the tool schemas of a conversation, if it has any."""
    where: str | list[str] = []
    """Conditions that a stored trajectory must fulfil, such as `reward>=1`, on the columns of `agent-loop show`."""
    best_of_group: Positive | None = None
    """Number of trajectories with the highest rewards to keep of each stored group; None keeps all."""
    max_tokens: Tokens = 4096
    """Longest conversation. Longer ones are left out and counted."""
    batch_size: Positive = 16
    """Conversations per optimiser step."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the conversations in `agent-loop sft`; None trains for `trainer.total_steps`."""
    every: Positive | None = None
    """Steps of `agent-loop train` between two supervised optimiser steps; None takes none."""

    @property
    def conditions(self) -> list[str]:
        """The conditions of `where`."""
        return [self.where] if isinstance(self.where, str) else self.where
