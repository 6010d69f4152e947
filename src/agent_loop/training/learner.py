"""What a step learns: rewards become advantages, and advantages become weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import Config
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.advantages import grpo_advantages, has_signal, weighed_turn_advantages
from agent_loop.training.checkpoint import Checkpoint
from agent_loop.training.policy import load_policy


class Learner:
    """Everything that is trained. One call at a time, from any thread."""

    def __init__(self, config: Config, *, actor: Actor) -> None:
        self._config = config
        self._actor = actor

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self._actor.model

    def learn(self, batch: RolloutBatch) -> dict[str, float]:
        """One step, from what was rolled out to new weights; returns metrics."""
        torch.set_num_threads(self._config.trainer.num_threads)
        algorithm = self._config.algorithm
        rewards_B, groups_B = batch["reward"], batch["group"]
        advantages_B = grpo_advantages(
            rewards_B, groups_B=groups_B, norm_by_std=algorithm.norm_adv_by_std_in_grpo
        )
        signal_B = has_signal(rewards_B, groups_B=groups_B)
        turns_BR = weighed_turn_advantages(
            batch, weight=algorithm.turn_reward_weight, norm_by_std=algorithm.norm_adv_by_std_in_grpo
        )
        if turns_BR is not None:
            signal_B = signal_B | (turns_BR != 0).any(dim=1)
        keep_B = signal_B if algorithm.drop_zero_variance_groups else batch["is_scored"]
        metrics = self._actor.update(
            batch, advantages_B=advantages_B, turn_advantages_BR=turns_BR, keep_B=keep_B
        )
        return metrics | {names.SIGNAL_SHARE: float(signal_B.float().mean())}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, as servers want them. They share the trainer's memory."""
        return self._actor.weights()

    def state_dict(self) -> dict[str, Any]:
        """All that is to be kept beside the policy's weights."""
        return self._actor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._actor.load_state_dict(state)


def load_learner(config: Config, *, checkpoint: Checkpoint | None = None) -> Learner:
    """The learner at the start of a run, or as a checkpoint left it.

    Raises:
        ConfigError: The model cannot be loaded.
        CheckpointError: The checkpoint is damaged.
    """
    reference = load_policy(config.model) if config.actor.kl_loss_coef else None
    actor = Actor(
        load_policy(config.model, path=None if checkpoint is None else checkpoint.model_path),
        config=config.actor,
        temperature=config.rollout.temperature,
        reference=reference,
        seed=config.trainer.seed,
    )
    learner = Learner(config, actor=actor)
    if checkpoint is not None:
        learner.load_state_dict(checkpoint.trainer_state())
    return learner
