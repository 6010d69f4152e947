"""An LLM server inside this process: any causal model that `transformers` loads, batched continuously, no service."""

from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.engine import EngineStats
from agent_loop.servers.embedded.server import EmbeddedServer

__all__ = ["EmbeddedConfig", "EmbeddedServer", "EngineStats"]
