"""All settings of a run, in a tree of sections."""

from __future__ import annotations

from pydantic import model_validator

from agent_loop.config.algorithm import AlgorithmConfig
from agent_loop.config.data import DataConfig
from agent_loop.config.distillation import DistillationConfig
from agent_loop.config.model import ModelConfig
from agent_loop.config.optim import ActorConfig, CriticConfig
from agent_loop.config.placement import PlacementConfig, check_placement
from agent_loop.config.reward import RewardConfig
from agent_loop.config.rollout import RolloutConfig
from agent_loop.config.sft import SftConfig
from agent_loop.config.trainer import TrainerConfig
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
    def _is_synchronous_if_deterministic(self) -> Config:
        if self.rollout.deterministic and self.trainer.mode == "async":
            raise ConfigError(
                "rollout.deterministic is true and trainer.mode is 'async', in which weights arrive at random times; "
                "set trainer.mode=sync"
            )
        return self

    @model_validator(mode="after")
    def _samples_at_the_temperature_of_teachers(self) -> Config:
        if self.distillation.teachers and self.rollout.temperature != 1:
            raise ConfigError(
                f"rollout.temperature is {self.rollout.temperature:g}, but distillation.teachers score at temperature "
                "1; set rollout.temperature=1"
            )
        return self

    @model_validator(mode="after")
    def _has_a_consistent_placement(self) -> Config:
        check_placement(self.placement, model=self.model, rollout=self.rollout, trainer=self.trainer)
        return self

    @model_validator(mode="after")
    def _has_one_process_for_a_base_of_few_bits(self) -> Config:
        if self.model.base_bits is not None and self.trainer.num_processes > 1:
            raise ConfigError(
                f"model.base_bits is {self.model.base_bits}, but trainer.num_processes is "
                f"{self.trainer.num_processes}, which would shard the weights; set trainer.num_processes=1, or unset "
                "model.base_bits"
            )
        return self

    @model_validator(mode="after")
    def _has_a_penalty_for_its_reference(self) -> Config:
        actor = self.actor
        if actor.reference_path is not None and not (actor.kl_loss_coef or self.algorithm.kl_reward_coef):
            raise ConfigError(
                f"actor.reference_path is {actor.reference_path!r}, but no KL penalty compares with it; set "
                "actor.kl_loss_coef or algorithm.kl_reward_coef, or unset actor.reference_path"
            )
        return self
