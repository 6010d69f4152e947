"""Servers and workers as processes of a Ray cluster."""

from __future__ import annotations

from agent_loop.config import Config
from agent_loop.rollout.manager import AgentLoopManager


def create_manager(config: Config) -> AgentLoopManager:
    """Create the manager for the runtime in `trainer.runtime`.

    Raises:
        ConfigError: A component that the configuration names does not exist or does not fit, or the runtime is Ray and
            Ray is not installed.
        ChatTemplateError: The model's chat template cannot render the conversations of this run.
    """
    if config.trainer.runtime == "local":
        return AgentLoopManager.from_config(config)
    from agent_loop.distributed.manager import ClusterManager  # late: the local runtime needs none of it

    return ClusterManager.from_config(config)
