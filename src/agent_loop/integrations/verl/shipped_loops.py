"""The shipped agent loops with verl's constructor, for subclasses written for verl."""

from __future__ import annotations

from agent_loop.integrations.verl.loops import AgentLoopBase
from agent_loop.loops import agent_data, partial, single_turn, tool_agent


class AgentData(agent_data.AgentData):
    """`agent_loop.loops.agent_data.AgentData` with verl's token lists."""

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens so far: the prompt of the next completion."""
        return [*super().prompt_ids, *super().response_ids]

    @property
    def response_ids(self) -> list[int]:
        """Tokens of the last completion."""
        return [] if self.completion is None else list(self.completion.token_ids)


class SingleTurnAgentLoop(AgentLoopBase, single_turn.SingleTurnAgentLoop):
    """`agent_loop.SingleTurnAgentLoop` with verl's constructor."""


class ToolAgentLoop(AgentLoopBase, tool_agent.ToolAgentLoop):
    """`agent_loop.ToolAgentLoop` with verl's constructor and `AgentData`."""

    agent_data_class = AgentData


class AsyncPartialToolAgentLoop(ToolAgentLoop, partial.AsyncPartialToolAgentLoop):
    """`agent_loop.AsyncPartialToolAgentLoop` with verl's constructor."""
