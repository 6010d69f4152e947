"""Multi-turn, tool-using rollouts for reinforcement learning, exact to the token.

The names below are the public interface. Each is imported at first use, so that `import agent_loop` stays quick and
loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_loop.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agent_loop.chat.parsers import ToolParser
    from agent_loop.chat.template import ChatTemplate
    from agent_loop.episode import Episode
    from agent_loop.interactions.base import BaseInteraction
    from agent_loop.loops.base import AgentLoopBase
    from agent_loop.loops.partial import AsyncPartialToolAgentLoop
    from agent_loop.loops.registry import register
    from agent_loop.loops.single_turn import SingleTurnAgentLoop
    from agent_loop.loops.tool_agent import ToolAgentLoop
    from agent_loop.rollout.manager import AgentLoopManager
    from agent_loop.rollout.worker import AgentLoopWorker
    from agent_loop.servers.base import AsyncServerBase
    from agent_loop.servers.manager import AsyncLLMServerManager
    from agent_loop.servers.scripted import ScriptedServer
    from agent_loop.tools.base import BaseTool, ToolResponse
    from agent_loop.tools.function import function_tool
    from agent_loop.training.registry import advantage_estimator, policy_loss
    from agent_loop.trajectory import AgentLoopOutput, Segment
    from agent_loop.types import AgentState, StopReason, TokenOutput

__version__ = "0.1.0"

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AgentState",
    "AsyncLLMServerManager",
    "AsyncPartialToolAgentLoop",
    "AsyncServerBase",
    "BaseInteraction",
    "BaseTool",
    "ChatTemplate",
    "Episode",
    "ScriptedServer",
    "Segment",
    "SingleTurnAgentLoop",
    "StopReason",
    "TokenOutput",
    "ToolAgentLoop",
    "ToolParser",
    "ToolResponse",
    "advantage_estimator",
    "function_tool",
    "policy_loss",
    "register",
]

_MODULE_OF = {
    "AgentLoopBase": "loops.base",
    "AgentLoopManager": "rollout.manager",
    "AgentLoopOutput": "trajectory",
    "AgentLoopWorker": "rollout.worker",
    "AgentState": "types",
    "AsyncLLMServerManager": "servers.manager",
    "AsyncPartialToolAgentLoop": "loops.partial",
    "AsyncServerBase": "servers.base",
    "BaseInteraction": "interactions.base",
    "BaseTool": "tools.base",
    "ChatTemplate": "chat.template",
    "Episode": "episode",
    "ScriptedServer": "servers.scripted",
    "Segment": "trajectory",
    "SingleTurnAgentLoop": "loops.single_turn",
    "StopReason": "types",
    "TokenOutput": "types",
    "ToolAgentLoop": "loops.tool_agent",
    "ToolParser": "chat.parsers",
    "ToolResponse": "tools.base",
    "advantage_estimator": "training.registry",
    "function_tool": "tools.function",
    "policy_loss": "training.registry",
    "register": "loops.registry",
}


__getattr__ = lazy_exports(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
