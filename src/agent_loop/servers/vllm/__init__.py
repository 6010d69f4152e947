"""A vLLM server that the run starts (`VLLMServer`), or one that runs elsewhere (`VLLMClient`)."""

from agent_loop.servers.vllm.client import VLLMClient
from agent_loop.servers.vllm.server import VLLMServer

__all__ = ["VLLMClient", "VLLMServer"]
