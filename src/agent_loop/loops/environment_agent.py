"""The loop of environments: the environment provides the tools, the replies and the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from msgspec import structs

from agent_loop.environments.base import Environment
from agent_loop.environments.factory import find_environment
from agent_loop.environments.live import LiveEnvironment
from agent_loop.episode import EpisodeStopped
from agent_loop.errors import DataError
from agent_loop.loops.registry import register
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.trajectory import AgentLoopOutput, Incident
from agent_loop.types import StopReason


@register("environment_agent")
class EnvironmentAgentLoop(ToolAgentLoop):
    """A tool loop in an environment. Every trajectory has its own environment, which is closed whatever happens.

    The row's `environment` names one of `rollout.multi_turn.environments` or a suite of this package. The name is
    optional if only one environment is configured. The environment's tools are the model's tools, and its replies
    follow turns that call no tool. Its reward is the trajectory's reward, also if a limit ended the trajectory, and the
    parts of the reward become columns.
    """

    environment: Environment | None = None
    """Environment of the trajectory, for handlers of subclasses. None before its reset."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        factory = find_environment(row.get("environment"), known=self.context.environments)
        self._live = live = LiveEnvironment(factory, row=row, limits=self.context.multi_turn)
        incidents: list[Incident] = []
        try:
            output = await self._play(live, sampling_params, row)
        finally:
            incidents += await live.close()
        for incident in incidents:
            output = output.noted(incident)
        return output

    async def _play(
        self, live: LiveEnvironment, sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        prompt = await live.prompt()
        self.environment = live.environment
        tools, known = await live.tools(), self.context.tools
        taken = sorted(tools.keys() & known.keys())
        if taken:
            raise DataError(
                f"{live.where} has a tool {taken[0]!r}, and another tool has that name; rename one of them"
            )
        self.context = structs.replace(self.context, tools={**known, **tools})
        try:
            output = await super().run(sampling_params, **{**row, "raw_prompt": prompt})
        except EpisodeStopped as stopped:
            output = cast(AgentLoopOutput, self.unfinished_output(stopped.reason))
        if output.stop_reason is StopReason.CANCELLED:
            return output
        score = await live.reward(list(output.messages))
        if score is None:
            return output
        return replace(output, reward_score=score.reward).with_extra_fields(score.extra)

    def _interaction(
        self, interaction_kwargs: Mapping[str, Any] | None, *, trajectory: str
    ) -> LiveEnvironment | None:
        if self._live.replies:
            return self._live
        return super()._interaction(interaction_kwargs, trajectory=trajectory)
