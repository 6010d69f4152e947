"""Agent loops. Importing this package registers the loops that come with it."""

from agent_loop.loops.environment_agent import EnvironmentAgentLoop
from agent_loop.loops.game_agent import GameAgentLoop
from agent_loop.loops.partial import AsyncPartialToolAgentLoop
from agent_loop.loops.single_turn import SingleTurnAgentLoop, UnusableRowLoop
from agent_loop.loops.tool_agent import ToolAgentLoop

__all__ = [
    "AsyncPartialToolAgentLoop",
    "EnvironmentAgentLoop",
    "GameAgentLoop",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "UnusableRowLoop",
]
