"""SGLang: an engine of ours, or a server that runs already."""

from agent_loop.servers.sglang.client import SGLangClient as SGLangClient
from agent_loop.servers.sglang.engine import SGLangServer as SGLangServer
