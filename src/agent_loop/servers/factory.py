"""Servers from a configuration."""

from __future__ import annotations

from agent_loop.config import ModelConfig, RolloutConfig
from agent_loop.errors import ConfigError
from agent_loop.registries import load_class
from agent_loop.servers.base import AsyncServerBase

ENGINES = {
    "embedded": "agent_loop.servers.embedded:EmbeddedServer",
    "scripted": "agent_loop.servers.scripted:ScriptedServer",
}


def create_servers(model: ModelConfig, *, rollout: RolloutConfig) -> list[AsyncServerBase]:
    """`rollout.num_servers` servers, each with a seed of its own.

    Raises:
        ConfigError: The engine is unknown, or refuses its options.
    """
    server_class = _server_class(rollout)
    return [
        server_class.create(
            name=f"{rollout.engine.rpartition(':')[2]}-{replica}",
            model=model,
            max_model_len=rollout.prompt_length + rollout.response_length,
            seed=rollout.seed + replica,
            engine_kwargs=rollout.engine_kwargs,
        )
        for replica in range(rollout.num_servers)
    ]


def _server_class(rollout: RolloutConfig) -> type[AsyncServerBase]:
    custom = rollout.agent.custom_async_server
    key = "rollout.engine" if custom is None else "rollout.agent.custom_async_server"
    if custom is not None:
        reference = f"{custom.path}:{custom.name}"
    elif ":" in rollout.engine:
        reference = rollout.engine
    elif rollout.engine in ENGINES:
        reference = ENGINES[rollout.engine]
    else:
        raise ConfigError(
            f"{key} is {rollout.engine!r}; give one of {', '.join(sorted(ENGINES))}, or module:Class of your own"
        )
    return load_class(reference, base=AsyncServerBase, key=key)
