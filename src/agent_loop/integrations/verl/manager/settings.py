"""Settings of this package from the configuration of a verl run, and the import of verl, which is not a dependency."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from agent_loop.config import Config
from agent_loop.config.validation import parse_section
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings

TRACE_NAMES = ("project_name", "experiment_name")
OWN_SECTION = "agent_loop_config"
"""Section of verl's configuration with settings that only this package has."""


def read_settings(config: DictConfig) -> Config:
    """Return the settings of a verl run.

    Time limits of trajectories and requests are off, as in verl. The section `agent_loop_config` overrides all values:
    `+agent_loop_config.rollout.trajectory_timeout_s=900`, for example.
    """
    rollout: Any = config.actor_rollout_ref.rollout
    settings: dict[str, Any] = {
        "model": {"path": str(config.actor_rollout_ref.model.path)},
        "rollout": _rollout_settings(rollout),
        "trainer": {
            name: value for name in TRACE_NAMES if (value := OmegaConf.select(config, f"trainer.{name}"))
        },
    }
    own = OmegaConf.select(config, OWN_SECTION)
    if own is not None:
        settings = merge_mappings(
            settings, cast(Mapping[str, Any], OmegaConf.to_container(own, resolve=True))
        )
    return parse_section(Config, settings, where=OWN_SECTION)


def run_dir_of(config: DictConfig) -> Path | None:
    """Return the folder for the run's trajectories; None unless `agent_loop_config.trainer.run_dir` is set."""
    path = OmegaConf.select(config, f"{OWN_SECTION}.trainer.run_dir")
    return None if path is None else Path(str(path)).absolute()


def _rollout_settings(rollout: Any) -> dict[str, Any]:
    turns, val = rollout.multi_turn, rollout.val_kwargs
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "val": {"temperature": val.temperature, "top_p": val.top_p, "top_k": val.top_k},
        "prompt_length": rollout.prompt_length,
        "response_length": rollout.response_length,
        "truncate_prompt": "left",
        "free_cache_engine": False,
        "max_concurrent": None,
        "trajectory_timeout_s": None,
        "request_timeout_s": None,
        "multi_turn": {
            "max_assistant_turns": turns.max_assistant_turns or None,
            "max_user_turns": turns.max_user_turns or None,
            "max_parallel_calls": turns.max_parallel_calls,
            # verl's tools truncate their own replies, in characters
            "max_tool_response_length": rollout.response_length,
            "format": turns.format,
        },
    }


@cache
def load_verl(reference: str) -> Any:
    """Return an object of verl or of TransferQueue, given as `module:name`."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{reference} cannot be imported: {error}; VerlAgentLoopManager runs in verl's trainer and needs verl 0.9.1"
        ) from error
