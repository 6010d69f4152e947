"""A SGLang server that the run starts (`SGLangServer`), or one that runs elsewhere (`SGLangClient`)."""

from agent_loop.servers.sglang.client import SGLangClient
from agent_loop.servers.sglang.server import SGLangServer

__all__ = ["SGLangClient", "SGLangServer"]
