"""The loop of one prompt and one completion, and the loop of rows that cannot be used."""

from __future__ import annotations

from typing import Any

from agent_loop.errors import DataError
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


@register("unusable_row")
class UnusableRowLoop(AgentLoopBase):
    """Fails with the row's `error`, so that one bad row of a source does not stop the others."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise DataError(str(row.get("error") or "the row cannot be used"))
