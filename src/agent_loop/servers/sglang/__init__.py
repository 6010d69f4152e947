"""SGLang engine that this process starts (`SGLangServer`), or a running SGLang server (`SGLangClient`)."""

from agent_loop.servers.sglang.client import SGLangClient as SGLangClient
from agent_loop.servers.sglang.engine import SGLangServer as SGLangServer
