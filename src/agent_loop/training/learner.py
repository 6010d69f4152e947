"""What a step learns: rewards become advantages, and advantages become weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import Config, OptimConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.advantages import Estimate, Rewards, collect_rewards, estimate_advantages
from agent_loop.training.checkpoint import Checkpoint
from agent_loop.training.critic import Critic, load_critic
from agent_loop.training.losses import kl_penalty, masked_mean
from agent_loop.training.micro_batches import trainable_rows
from agent_loop.training.policy import load_policy
from agent_loop.training.targets import PastLogProbs

CRITIC_FOLDER = "critic"
"""Of a checkpoint: what `transformers` loads as the critic."""
OptimConfigT = TypeVar("OptimConfigT", bound=OptimConfig)


class Learner:
    """Everything that is trained. One call at a time, from any thread."""

    def __init__(self, config: Config, *, actor: Actor, critic: Critic | None = None) -> None:
        """Takes over what is trained.

        Args:
            config: Of the whole run.
            actor: The policy.
            critic: Needed for `algorithm.adv_estimator=gae`.
        """
        if config.algorithm.adv_estimator == "gae" and critic is None:
            raise ValueError("algorithm.adv_estimator is gae, which needs a critic; give one")
        self._config = config
        self._actor = actor
        self._critic = critic

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self._actor.model

    def models(self) -> dict[str, PreTrainedModel]:
        """All that is trained: `policy` and, where there is one, `critic`."""
        models = {"policy": self._actor.model}
        return models if self._critic is None else models | {"critic": self._critic.model}

    def learn(
        self, batch: RolloutBatch, *, baseline_rewards: Mapping[int, float] | None = None
    ) -> dict[str, float]:
        """One step, from what was rolled out to new weights; returns metrics.

        Args:
            batch: As `assemble` makes it.
            baseline_rewards: For `remax`: by group, what a greedy trajectory of its prompt earned, its turns' rewards
                as `algorithm.turn_reward_weight` has it included. Groups that are missing, or NaN, are not trained.

        Raises:
            DataError: A trajectory has no prompt, or something that the configuration compares with is missing.
        """
        torch.set_num_threads(self._config.trainer.num_threads)

        # 1. What each trajectory earned, and at which tokens.
        rewards, past, metrics = self._rewards(batch)

        # 2. What each token is to learn.
        values_BR = None
        if self._critic is not None:
            values_BR = self._critic.values(batch, rows=trainable_rows(batch, batch["is_scored"]))
        estimate = estimate_advantages(
            rewards,
            config=self._config.algorithm,
            is_allowed_B=self._is_allowed(batch),
            values_BR=values_BR,
            baselines_B=self._baselines(batch, baseline_rewards),
        )
        metrics |= _estimate_metrics(estimate, mask_BR=batch["response_mask"])

        # 3. New weights.
        if self._critic is not None and estimate.returns_BR is not None and values_BR is not None:
            is_head_start = self._critic.num_updates < self._config.critic.head_start
            metrics |= self._critic.update(
                batch, returns_BR=estimate.returns_BR, old_values_BR=values_BR, keep_B=estimate.keep_B
            )
            if is_head_start:
                return metrics
        return metrics | self._actor.update(
            batch, advantages_BR=estimate.advantages_BR, keep_B=estimate.keep_B, past=past
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, as servers want them. They may share the trainer's memory."""
        return self._actor.weights()

    def state_dict(self) -> dict[str, Any]:
        """All that is to be kept beside the models."""
        state = self._actor.state_dict()
        return state if self._critic is None else state | {"critic": self._critic.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. A critic that was not there begins anew."""
        self._actor.load_state_dict(state)
        if self._critic is not None and "critic" in state:
            self._critic.load_state_dict(state["critic"])

    def _rewards(self, batch: RolloutBatch) -> tuple[Rewards, PastLogProbs | None, dict[str, float]]:
        """With the log-probs that they needed, and metrics."""
        algorithm = self._config.algorithm
        past, kl_BR, metrics = None, None, dict[str, float]()
        if algorithm.kl_reward_coef:
            past = self._actor.past_log_probs(batch, rows=trainable_rows(batch, batch["is_scored"]))
            if past.reference_BR is None:
                raise ValueError("algorithm.kl_reward_coef needs a reference model; give the actor one")
            is_scored_BR = batch["response_mask"] * batch["is_scored"][:, None]
            kl_BR = kl_penalty(
                past.old_BR,
                reference_log_probs_BT=past.reference_BR,
                mask_BT=is_scored_BR,
                estimator=algorithm.kl_reward_type,
            )
            metrics[names.KL_TO_REFERENCE] = float(masked_mean(kl_BR, mask_BT=is_scored_BR))
        rewards = collect_rewards(
            batch, config=algorithm, response_length=self._config.rollout.response_length, kl_BR=kl_BR
        )
        return rewards, past, metrics

    def _is_allowed(self, batch: RolloutBatch) -> Tensor:
        untrained = {reason.value for reason in self._config.algorithm.untrained_stop_reasons}
        return torch.tensor([reason not in untrained for reason in cast(list[str], batch["stop_reason"])])

    def _baselines(self, batch: RolloutBatch, baseline_rewards: Mapping[int, float] | None) -> Tensor | None:
        if self._config.algorithm.adv_estimator != "remax":
            return None
        if baseline_rewards is None:
            raise DataError(
                "algorithm.adv_estimator is remax, which compares with a greedy trajectory of each prompt; give "
                "baseline_rewards"
            )
        groups: list[int] = batch["group"].tolist()
        return torch.tensor([baseline_rewards.get(group, torch.nan) for group in groups])


def load_learner(config: Config, *, checkpoint: Checkpoint | None = None) -> Learner:
    """The learner at the start of a run, or as a checkpoint left it.

    Raises:
        ConfigError: A model cannot be loaded or not be trained so.
        CheckpointError: The checkpoint is damaged.
    """
    seed = config.trainer.seed
    reference = None
    if config.actor.kl_loss_coef or config.algorithm.kl_reward_coef:
        reference = load_policy(config.model.model_copy(update={"lora_rank": 0}))
    actor = Actor(
        load_policy(config.model, path=None if checkpoint is None else checkpoint.model_path, seed=seed),
        config=_with_loss_length(config.actor, config),
        temperature=config.rollout.temperature,
        reference=reference,
        seed=seed,
    )
    learner = Learner(config, actor=actor, critic=_load_critic(config, checkpoint))
    if checkpoint is not None:
        learner.load_state_dict(checkpoint.trainer_state())
    return learner


def _load_critic(config: Config, checkpoint: Checkpoint | None) -> Critic | None:
    if config.algorithm.adv_estimator != "gae":
        return None
    folder = None if checkpoint is None else checkpoint.path / CRITIC_FOLDER
    model = load_critic(
        config.critic,
        model_config=config.model,
        path=folder if folder is not None and folder.is_dir() else None,
    )
    return Critic(model, config=_with_loss_length(config.critic, config), seed=config.trainer.seed)


def _with_loss_length(section: OptimConfigT, config: Config) -> OptimConfigT:
    return section.model_copy(update={"loss_length": section.loss_length or config.rollout.response_length})


def _estimate_metrics(estimate: Estimate, *, mask_BR: Tensor) -> dict[str, float]:
    metrics = {names.SIGNAL_SHARE: float(estimate.has_signal_B.float().mean())}
    trained_N = estimate.advantages_BR[mask_BR.bool() & estimate.keep_B[:, None]]
    if len(trained_N):
        metrics[names.ADVANTAGE_MEAN] = float(trained_N.mean())
        metrics[names.ADVANTAGE_STD] = float(trained_N.std(correction=0))
    return metrics
