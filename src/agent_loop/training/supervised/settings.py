"""Settings of a supervised run."""

from __future__ import annotations

from agent_loop.config import AlgorithmConfig, Config, PlacementConfig
from agent_loop.errors import ConfigError


def check_sources(config: Config) -> None:
    """Check that there are sources of examples.

    Raises:
        ConfigError: There are none for training, or none for a validation that is switched on.
    """
    if not config.sft.files:
        raise ConfigError(
            "sft.files is empty; give at least one file of conversations, or the folder of a run"
        )
    if config.trainer.val_every is not None and not config.sft.val_files:
        raise ConfigError(
            "validation is switched on but sft.val_files is empty; give it conversations, or unset trainer.val_every"
        )


def supervised_config(config: Config) -> Config:
    """Return the settings of a supervised run: without critic and reference model, at temperature 1."""
    check_sources(config)
    return config.model_copy(
        update={
            "algorithm": AlgorithmConfig(),
            "actor": config.actor.model_copy(update={"kl_loss_coef": 0.0, "reference_path": None}),
            "rollout": config.rollout.model_copy(
                update={
                    "engine": "embedded",  # there are no servers, so the trainer takes the first devices
                    "temperature": 1.0,
                    "prompt_length": 1,
                    "response_length": config.sft.max_tokens,
                }
            ),
            "placement": PlacementConfig(),
        }
    )
