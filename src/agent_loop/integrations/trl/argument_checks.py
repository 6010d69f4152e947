"""Checks that TRL's arguments agree with the configuration, made before anything is sampled."""

from __future__ import annotations

from typing import Any

from agent_loop.config import RolloutConfig
from agent_loop.errors import ConfigError


def check_grpo_trainer(trainer: Any, *, config: RolloutConfig) -> None:
    """Check that a `GRPOTrainer` trains on exactly what the servers sample.

    Raises:
        ConfigError: The trainer has its own tools, environments or vLLM, several processes, or other limits.
    """
    if trainer.tools or trainer.environment_factories is not None:
        raise ConfigError(
            "GRPOTrainer has tools= or environment_factory=, which it would run in addition to the agent loop; "
            "remove them and name them in rollout.multi_turn.tools or rollout.multi_turn.environments"
        )
    if trainer.args.use_vllm:
        raise ConfigError(
            "GRPOConfig.use_vllm is True, but the servers of the configuration sample; set use_vllm=False, and "
            "rollout.engine=vllm to sample with vLLM"
        )
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"GRPOTrainer runs in {trainer.accelerator.num_processes} processes, each of which would start its own "
            "servers; run it in one process, or train with agent-loop train"
        )
    _check_sampling(trainer.args, config=config)


def check_async_args(args: Any, *, config: RolloutConfig) -> None:
    """Check that the arguments of an `AsyncGRPOTrainer` agree with the configuration.

    Raises:
        ConfigError: The arguments have other limits, another temperature, or several processes.
    """
    if args.distributed_state is not None and args.distributed_state.num_processes > 1:
        raise ConfigError(
            f"AsyncGRPOConfig is for {args.distributed_state.num_processes} processes, each of which would create a "
            "worker; run it in one process, or train with agent-loop train"
        )
    _check_sampling(args, config=config)


def _check_sampling(args: Any, *, config: RolloutConfig) -> None:
    name = type(args).__name__
    if args.temperature != config.temperature:
        raise ConfigError(
            f"{name}.temperature is {args.temperature} but rollout.temperature is {config.temperature}, so the trainer "
            "would compute log-probs of another policy than the sampling one; make them equal"
        )
    if args.max_completion_length < config.response_length:
        raise ConfigError(
            f"{name}.max_completion_length is {args.max_completion_length}, below rollout.response_length "
            f"{config.response_length}; raise the first or lower the second"
        )
