"""LLM server in a thread of this process: continuous batching for any causal model that `transformers` loads."""

from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.engine import EngineStats
from agent_loop.servers.embedded.server import EmbeddedServer

__all__ = ["EmbeddedConfig", "EmbeddedServer", "EngineStats"]
