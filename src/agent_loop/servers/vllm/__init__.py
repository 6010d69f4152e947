"""vLLM in this process (`VLLMServer`), or a vLLM server that runs elsewhere (`VLLMClient`)."""

from agent_loop.servers.vllm.client import VLLMClient
from agent_loop.servers.vllm.engine import VLLMServer

__all__ = ["VLLMClient", "VLLMServer"]
