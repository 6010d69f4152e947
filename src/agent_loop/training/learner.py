"""The training part of a step: rewards to advantages, and advantages to new weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import Config, OptimConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.batch import TENSOR_COLUMNS, RolloutBatch
from agent_loop.servers.embedded.runner import use_deterministic_kernels
from agent_loop.storage.columns import Learned
from agent_loop.training import metrics as names
from agent_loop.training.actor import TRAIN_LOG_PROBS, Actor
from agent_loop.training.actor_loss import PastLogProbs
from agent_loop.training.advantages.estimate import (
    BatchAdvantages,
    estimate_batch,
    estimator_needs,
    load_estimators,
)
from agent_loop.training.advantages.groups import branch_weights, rollouts_of_rows
from agent_loop.training.advantages.rewards import has_seats
from agent_loop.training.checkpoint import MODEL_FOLDER, Checkpoint, load_state, save_state
from agent_loop.training.critic import Critic, load_critic
from agent_loop.training.distillation.targets import COLUMNS as TEACHER_COLUMNS
from agent_loop.training.distillation.targets import TeacherTargets
from agent_loop.training.losses.terms import kl_penalty, masked_mean
from agent_loop.training.micro_batches import trainable_rows
from agent_loop.training.policy import compute_dtype, device_of, load_policy, load_reference
from agent_loop.training.process_group import SINGLE_PROCESS, ProcessGroup, RankCommand
from agent_loop.trajectory import Trajectory

ADVANTAGES = "advantages"
"""Column that the learner adds to its batch, float32 [B, R]."""
IS_TRAINED = "is_trained"
"""Column that the learner adds to its batch, bool [B]: rows that were trained."""
CRITIC_FOLDER = "critic"
"""Subfolder of a checkpoint with the critic, in the format of `transformers`."""
OptimConfigT = TypeVar("OptimConfigT", bound=OptimConfig)


class Learner:
    """Actor and critic of a training. Call one method at a time, from any thread.

    In a process group, rank 0 calls the methods, and the other ranks make the same calls through `run_command`.
    """

    def __init__(
        self,
        config: Config,
        *,
        actor: Actor,
        critic: Critic | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Take ownership of the actor, and of the critic that some estimators need."""
        self._estimators = load_estimators(config.algorithm)
        self._estimator = self._estimators[None]
        self._config = config
        self._actor = actor
        self._critic = critic
        self._process_group = process_group

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self._actor.model

    def learn(
        self, batch: RolloutBatch, *, baseline_rewards: Mapping[int, float] | None = None
    ) -> dict[str, float]:
        """Train on the rollout of one step and return metrics.

        The advantages, the trained rows and the trainer's log-probs are added to the batch as columns.
        `baseline_rewards` are the rewards of greedy rollouts by group, for estimators that need them (`remax`). They
        include the rewards of turns times `algorithm.turn_reward_weight`. Groups without one are not trained.
        """
        if self._process_group.size > 1 and "attachments" in batch:
            raise ConfigError(
                "the batch has images or videos, which one process alone can train on; set trainer.num_processes=1"
            )
        with self._process_group.on_all_ranks(
            "learn", batch=_for_other_ranks(batch), baseline_rewards=baseline_rewards
        ):
            return self._learn(batch, baseline_rewards)

    def supervise(self, batch: RolloutBatch, *, advances_schedule: bool = True) -> dict[str, float]:
        """Take one optimiser step on the cross-entropy of the sampled tokens; see `Actor.supervise`."""
        options = {"advances_schedule": advances_schedule}
        with self._process_group.on_all_ranks("supervise", batch=_for_other_ranks(batch), **options):
            self._set_threads()
            return self._actor.supervise(batch, **options)

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return the log-probs of the sampled tokens under the current weights; see `Actor.logprobs`."""
        with self._process_group.on_all_ranks("logprobs", batch=_for_other_ranks(batch)):
            self._set_threads()
            return self._actor.logprobs(batch)

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the policy's weights for servers; see `Actor.weights`. They may share the trainer's memory."""
        if not self._actor.trains_factors_alone:
            return self._gathered_weights()
        with self._process_group.on_all_ranks("weights"):
            return self._actor.weights()

    def _gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._process_group.on_all_ranks("weights"):
            is_read = True
            for weight in self._actor.weights():
                try:
                    if is_read:
                        yield weight
                except GeneratorExit:  # the other ranks gather all weights, so this rank must too
                    is_read = False

    def save(self, folder: Path) -> None:
        """Save the models and the training state."""
        with self._process_group.on_all_ranks("save", folder=folder):
            self._actor.save(folder / MODEL_FOLDER)
            if self._critic is not None:
                self._critic.save(folder / CRITIC_FOLDER)
            save_state(self._state_dict(), folder)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the training state; the models are loaded already. A critic that is not in the checkpoint starts new."""
        state = self._state_dict()
        if _critic_folder(checkpoint) is None:
            state.pop("critic", None)
        load_state(state, checkpoint)
        self._actor.optimizer.load_state_dict(state["actor"])
        if self._critic is not None and "critic" in state:
            self._critic.optimizer.load_state_dict(state["critic"])

    def run_command(self, command: RankCommand) -> None:
        """Run a command of rank 0 on this rank."""
        result: Any = getattr(self, command.method)(**command.arguments)
        for _ in result if command.method == "weights" else ():
            pass

    def _learn(self, batch: RolloutBatch, baseline_rewards: Mapping[int, float] | None) -> dict[str, float]:
        self._set_threads()

        # 1. Penalties of tokens.
        teachers = TeacherTargets.of(batch, config=self._config.distillation)
        is_taught_B = batch["is_scored"] & False if teachers is None else teachers.is_taught_B
        kl_BR, past, metrics = self._kl_penalty(batch, is_trained_B=batch["is_scored"] | is_taught_B)

        # 2. Rewards and advantages of tokens.
        values_BR = None
        if self._critic is not None:
            values_BR = self._critic.values(batch, rows=trainable_rows(batch, batch["is_scored"]))
        untrained = {reason.value for reason in self._config.algorithm.untrained_stop_reasons}
        is_allowed_B = torch.tensor([reason not in untrained for reason in batch["stop_reason"]])
        estimate = estimate_batch(
            batch,
            estimators=self._estimators,
            response_length=self._config.rollout.response_length,
            kl_BR=kl_BR,
            is_allowed_B=is_allowed_B,
            values_BR=values_BR,
            baselines_B=self._baselines(batch, baseline_rewards),
        )
        of_rewards = estimate
        if teachers is not None:
            estimate, past = self._add_teachers(
                teachers, batch, estimate, is_allowed_B=is_allowed_B, past=past
            )
        metrics |= _estimate_metrics(estimate, batch)
        batch[ADVANTAGES], batch[IS_TRAINED] = estimate.advantages_BR, estimate.keep_B

        # 3. New weights.
        if self._critic is not None and estimate.returns_BR is not None and values_BR is not None:
            is_head_start = self._critic.optimizer.num_updates < self._config.critic.head_start
            metrics |= self._critic.update(
                batch, returns_BR=estimate.returns_BR, old_values_BR=values_BR, keep_B=of_rewards.keep_B
            )
            if is_head_start:
                return metrics
        metrics |= self._actor.update(
            batch,
            advantages_BR=estimate.advantages_BR,
            keep_B=estimate.keep_B,
            past=past,
            teachers=teachers if teachers is not None and teachers.is_loss else None,
        )
        if teachers is not None:
            metrics |= teachers.metrics(batch, old_logprobs_BR=None if past is None else past.old_BR)
        return metrics

    def _add_teachers(
        self,
        teachers: TeacherTargets,
        batch: RolloutBatch,
        estimate: BatchAdvantages,
        *,
        is_allowed_B: Tensor,
        past: PastLogProbs | None,
    ) -> tuple[BatchAdvantages, PastLogProbs | None]:
        """Return the advantages with what teachers add, the rows to train on, and the log-probs that they needed.

        A row that a teacher scored is trained even if its reward has no signal.
        """
        config = self._config.distillation
        is_rewarded_B = estimate.keep_B & bool(config.reward_coef)
        keep_B = is_rewarded_B | (teachers.is_taught_B & is_allowed_B)
        advantages_BR = torch.where(is_rewarded_B[:, None], config.reward_coef * estimate.advantages_BR, 0.0)
        if not teachers.is_loss:
            past = past or self._actor.past_logprobs(batch, rows=trainable_rows(batch, keep_B))
            advantages_BR = advantages_BR + config.coef * teachers.advantages(past.old_BR)
        return replace(estimate, advantages_BR=advantages_BR, keep_B=keep_B), past

    def _set_threads(self) -> None:
        torch.set_num_threads(self._config.trainer.num_threads)

    def _state_dict(self) -> dict[str, Any]:
        state = {"actor": self._actor.optimizer.state_dict()}
        return state if self._critic is None else state | {"critic": self._critic.optimizer.state_dict()}

    def _kl_penalty(
        self, batch: RolloutBatch, *, is_trained_B: Tensor
    ) -> tuple[Tensor | None, PastLogProbs | None, dict[str, float]]:
        """Return the KL penalty in the reward, the log-probs that it needed, and metrics."""
        algorithm = self._config.algorithm
        if not algorithm.kl_reward_coef:
            return None, None, {}
        past = self._actor.past_logprobs(batch, rows=trainable_rows(batch, is_trained_B))
        assert past.reference_BR is not None
        is_scored_BR = batch["response_mask"] * batch["is_scored"][:, None]
        kl_BR = kl_penalty(
            past.old_BR,
            reference_logprobs_BT=past.reference_BR,
            mask_BT=is_scored_BR,
            estimator=algorithm.kl_reward_type,
        )
        return kl_BR, past, {names.KL_TO_REFERENCE: float(masked_mean(kl_BR, mask_BT=is_scored_BR))}

    def _baselines(self, batch: RolloutBatch, baseline_rewards: Mapping[int, float] | None) -> Tensor | None:
        if not self._estimator.needs.greedy_rollouts:
            return None
        if baseline_rewards is None:
            raise DataError(
                f"algorithm.adv_estimator is {self._estimator.registered.name}, which compares with a greedy "
                "trajectory of each prompt; give baseline_rewards"
            )
        if has_seats(batch):
            raise DataError(
                f"algorithm.adv_estimator is {self._estimator.registered.name}, which does not tell the seats of a "
                "game apart; choose an estimator that compares in groups, such as grpo"
            )
        groups: list[int] = batch["group"].tolist()
        return torch.tensor([baseline_rewards.get(group, torch.nan) for group in groups])


def _for_other_ranks(batch: RolloutBatch) -> RolloutBatch:
    """Return a batch without the arrays that servers attached to tokens, which may be large."""
    known, columns = {*TENSOR_COLUMNS, *TEACHER_COLUMNS}, dict[str, Any](cast(Any, batch).items())
    return batch.select(*(name for name in columns if name in known or not isinstance(columns[name], Tensor)))


def load_learner(
    config: Config, *, checkpoint: Checkpoint | None = None, process_group: ProcessGroup = SINGLE_PROCESS
) -> Learner:
    """Load the learner of a new run, or the learner of a checkpoint."""
    with process_group.on_all_ranks("load", checkpoint=checkpoint):
        if config.rollout.deterministic:
            use_deterministic_kernels(device_of(config.model))
        learner = _load_models(config, checkpoint, process_group)
        if checkpoint is not None:
            learner.load(checkpoint)
    return learner


def _load_models(config: Config, checkpoint: Checkpoint | None, process_group: ProcessGroup) -> Learner:
    model_config, seed, dtype = config.model, config.trainer.seed, compute_dtype(config.model)
    if process_group.mesh is not None:  # sharding moves the models to their device, one layer after the other
        model_config = model_config.model_copy(update={"device": "cpu"})
    policy = load_policy(model_config, path=None if checkpoint is None else checkpoint.model_path, seed=seed)
    reference = load_reference(config, policy=policy, device=model_config.device)
    actor = Actor(
        policy,
        config=_with_loss_length(config.actor, config),
        temperature=config.rollout.temperature,
        reference=reference,
        dtype=dtype,
        seed=seed,
        process_group=process_group,
    )
    critic = None
    if estimator_needs(config.algorithm.adv_estimator).critic:
        critic = Critic(
            load_critic(config.critic, model_config=model_config, path=_critic_folder(checkpoint)),
            config=_with_loss_length(config.critic, config),
            dtype=dtype,
            seed=seed,
            process_group=process_group,
        )
    return Learner(config, actor=actor, critic=critic, process_group=process_group)


def _critic_folder(checkpoint: Checkpoint | None) -> Path | None:
    """Return the critic's folder in a checkpoint; None for a new critic."""
    folder = None if checkpoint is None else checkpoint.path / CRITIC_FOLDER
    return folder if folder is not None and folder.is_dir() else None


def _with_loss_length(section: OptimConfigT, config: Config) -> OptimConfigT:
    return section.model_copy(update={"loss_length": section.loss_length or config.rollout.response_length})


def _estimate_metrics(estimate: BatchAdvantages, batch: RolloutBatch) -> dict[str, float]:
    weights_B = branch_weights(rollouts_of_rows(batch))
    num_rollouts = weights_B.sum().clamp(min=1)
    metrics = {names.SIGNAL_SHARE: float((estimate.has_signal_B * weights_B).sum() / num_rollouts)}
    trained_N = estimate.advantages_BR[batch["response_mask"].bool() & estimate.keep_B[:, None]]
    if len(trained_N):
        metrics[names.ADVANTAGE_MEAN] = float(trained_N.mean())
        metrics[names.ADVANTAGE_STD] = float(trained_N.std(correction=0))
    return metrics


def learned_of(batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> list[Learned]:
    """Return what `Learner.learn` wrote to its batch, by trajectory."""
    held = cast(Any, batch)
    columns = (held.get(name, None) for name in (ADVANTAGES, IS_TRAINED, TRAIN_LOG_PROBS))
    advantages_BR, is_trained_B, logprobs_BR = columns
    learned: list[Learned] = []
    for row, trajectory in enumerate(trajectories):
        tokens = slice(len(trajectory.output.response_ids))
        is_trained = is_trained_B is not None and bool(is_trained_B[row])
        logprobs = None if logprobs_BR is None else logprobs_BR[row, tokens].numpy()
        is_known = logprobs is not None and not np.isnan(logprobs).any()
        learned.append(
            Learned(
                advantages=advantages_BR[row, tokens].numpy() if is_trained else None,
                train_logprobs=logprobs if is_known else None,
                trained_mask=batch["response_mask"][row, tokens].numpy().astype(bool),
            )
        )
    return learned
