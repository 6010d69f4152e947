"""The OpenAI and Anthropic APIs over HTTP: in front of a pool of servers, and as the gateway that records agents.

`agent_loop.serve.chat` alone needs no extra. The names below need the extra `serve`. Each is imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_loop.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agent_loop.serve.app import ServedModel, create_app
    from agent_loop.serve.gateway import Endpoint, anthropic_client, http_client, openai_client, reachable
    from agent_loop.serve.program import AgentProgramLoop, ProgramLoop
    from agent_loop.serve.session import Session

__all__ = [
    "AgentProgramLoop",
    "Endpoint",
    "ProgramLoop",
    "ServedModel",
    "Session",
    "anthropic_client",
    "create_app",
    "http_client",
    "openai_client",
    "reachable",
]

_MODULE_OF = {
    **dict.fromkeys(__all__, "gateway"),
    **dict.fromkeys(["AgentProgramLoop", "ProgramLoop"], "program"),
    **dict.fromkeys(["ServedModel", "create_app"], "app"),
    "Session": "session",
}
__getattr__ = lazy_exports(__name__, _MODULE_OF)
