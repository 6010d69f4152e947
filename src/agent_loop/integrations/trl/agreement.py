"""What TRL's arguments and the configuration must agree on, checked before anything is sampled."""

from __future__ import annotations

from typing import Any

from agent_loop.config import RolloutConfig
from agent_loop.errors import ConfigError


def check_grpo_trainer(trainer: Any, *, config: RolloutConfig) -> None:
    """Refuses a `GRPOTrainer` that would train on something else than what was sampled.

    Raises:
        ConfigError: It has tools or environments of its own, a vLLM of its own, several processes, or other limits.
    """
    if trainer.tools or trainer.environment_factories is not None:
        raise ConfigError(
            "GRPOTrainer was given tools= or environment_factory=, which it would run on top of what the loops ran; "
            "leave them out and name them in rollout.multi_turn.tools or rollout.multi_turn.environments"
        )
    if trainer.args.use_vllm:
        raise ConfigError(
            "GRPOConfig.use_vllm is True, but sampling is up to the servers of the configuration; set "
            "use_vllm=False, and rollout.engine=vllm if vLLM is to sample"
        )
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"GRPOTrainer runs in {trainer.accelerator.num_processes} processes, but each would start servers of its "
            "own; run it in one, or train with agent-loop train"
        )
    _check_sampling(trainer.args, config=config)


def check_async_args(args: Any, *, config: RolloutConfig) -> None:
    """Refuses arguments of an `AsyncGRPOTrainer` that do not fit.

    Raises:
        ConfigError: They have other limits, or another temperature.
    """
    if args.distributed_state is not None and args.distributed_state.num_processes > 1:
        raise ConfigError(
            f"AsyncGRPOConfig is for {args.distributed_state.num_processes} processes, but the worker is made in "
            "each of them; run it in one, or train with agent-loop train"
        )
    _check_sampling(args, config=config)


def _check_sampling(args: Any, *, config: RolloutConfig) -> None:
    name = type(args).__name__
    if args.temperature != config.temperature:
        raise ConfigError(
            f"{name}.temperature is {args.temperature} but rollout.temperature is {config.temperature}, so that the "
            "trainer would score another policy than the one that samples; make them equal"
        )
    if args.max_completion_length < config.response_length:
        raise ConfigError(
            f"{name}.max_completion_length is {args.max_completion_length}, below rollout.response_length "
            f"{config.response_length}; raise the first or lower the second"
        )
