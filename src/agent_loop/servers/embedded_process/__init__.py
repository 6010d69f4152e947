"""The embedded engine in a process of its own: it computes while the event loop of the rollouts works."""

from agent_loop.servers.embedded_process.server import EmbeddedProcess

__all__ = ["EmbeddedProcess"]
