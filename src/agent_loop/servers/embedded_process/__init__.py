"""The embedded engine in its own process, so that it computes while the event loop of the rollouts runs."""

from agent_loop.servers.embedded_process.server import EmbeddedProcess

__all__ = ["EmbeddedProcess"]
