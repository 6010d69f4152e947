"""All settings of a run, in a tree of sections."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator

from agent_loop.config.placement import PlacementConfig, TrainerConfig, check_placement
from agent_loop.config.rollout import RolloutConfig
from agent_loop.config.task import DataConfig, ModelConfig, RewardConfig
from agent_loop.config.training import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    DistillationConfig,
    SftConfig,
)
from agent_loop.config.values import Section
from agent_loop.errors import ConfigError


class Config(Section):
    """All settings of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    distillation: DistillationConfig = DistillationConfig()
    sft: SftConfig = SftConfig()
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> Config:
        check_placement(self.placement, model=self.model, rollout=self.rollout, trainer=self.trainer)
        for fault in self._contradictions():
            raise ConfigError(fault)
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yield what is wrong between sections, with the remedy."""
        model, rollout, actor, trainer = self.model, self.rollout, self.actor, self.trainer
        if rollout.deterministic and trainer.mode == "async":
            yield (
                "rollout.deterministic is true and trainer.mode is 'async', in which weights arrive at random times; "
                "set trainer.mode=sync"
            )
        if self.distillation.teachers and rollout.temperature != 1:
            yield (
                f"rollout.temperature is {rollout.temperature:g}, but distillation.teachers score at temperature 1; "
                "set rollout.temperature=1"
            )
        if model.base_bits is not None and trainer.num_processes > 1:
            yield (
                f"model.base_bits is {model.base_bits}, but trainer.num_processes is {trainer.num_processes}, which "
                "would shard the weights; set trainer.num_processes=1, or unset model.base_bits"
            )
        if actor.reference_path is not None and not (actor.kl_loss_coef or self.algorithm.kl_reward_coef):
            yield (
                f"actor.reference_path is {actor.reference_path!r}, but no KL penalty compares with it; set "
                "actor.kl_loss_coef or algorithm.kl_reward_coef, or unset actor.reference_path"
            )
