"""The loop of one prompt and one completion."""

from __future__ import annotations

from typing import Any

from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.trajectory import AgentLoopOutput


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Renders the prompt and samples one completion."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            return episode.output()
