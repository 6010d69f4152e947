"""Servers and workers as processes of a Ray cluster."""

from __future__ import annotations

from agent_loop.config import Config
from agent_loop.rollout.manager import AgentLoopManager


def create_manager(config: Config) -> AgentLoopManager:
    """Create the manager for the runtime in `trainer.runtime`."""
    if config.trainer.runtime == "local":
        return AgentLoopManager.from_config(config)
    from agent_loop.distributed.manager import ClusterManager  # late: the local runtime needs none of it

    return ClusterManager.from_config(config)
