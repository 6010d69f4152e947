"""The loop of environments: the environment provides the tools, the replies and the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from msgspec import structs

from agent_loop.environments.base import Environment
from agent_loop.environments.factory import find_environment
from agent_loop.environments.live import LiveEnvironment, run_close, run_method
from agent_loop.episode import EpisodeStopped
from agent_loop.errors import DataError
from agent_loop.loops.registry import register
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind
from agent_loop.types import StopReason

INTERACTION_NAME = "environment"


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
        live = LiveEnvironment(find_environment(row.get("environment"), known=self.context.environments))
        problems: list[str] = []
        try:
            output = await self._play(live, sampling_params, row)
        finally:
            timeout_s = self.context.multi_turn.close_timeout_s
            problems += await run_close(live.close, what=live.where, timeout_s=timeout_s)
        for problem in problems:
            output = output.noted(Incident(IncidentKind.CLOSE_FAILED, problem))
        return output

    async def _play(
        self, live: LiveEnvironment, sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        config = self.context.multi_turn
        row = await run_method(
            partial(self._start, live, row),
            what=f"reset of {live.where}",
            timeout_s=config.interaction_timeout_s,
            key="interaction_timeout_s",
        )
        try:
            output = await super().run(sampling_params, **row)
        except EpisodeStopped as stopped:
            output = cast(AgentLoopOutput, self.unfinished_output(stopped.reason))
        if output.stop_reason is StopReason.CANCELLED:
            return output
        score = await run_method(
            partial(live.reward, list(output.messages)),
            what=f"reward of {live.where}",
            timeout_s=config.close_timeout_s,
            key="close_timeout_s",
        )
        if score is None:
            return output
        return replace(output, reward_score=score.reward).with_extra_fields(score.extra)

    async def _start(self, live: LiveEnvironment, row: Mapping[str, Any]) -> dict[str, Any]:
        """Reset the environment, add its tools and replies to the context, and return the row with its prompt."""
        prompt = await live.reset(row)
        self.environment = live.environment
        tools, interactions, known = await live.tools(), {**self.context.interactions}, self.context.tools
        taken = sorted(tools.keys() & known.keys())
        if taken:
            raise DataError(
                f"{live.where} has a tool {taken[0]!r}, and another tool has that name; rename one of them"
            )
        started = {**row, "raw_prompt": prompt}
        if live.replies:
            interactions[INTERACTION_NAME] = live.interaction(name=INTERACTION_NAME)
            started["interaction_kwargs"] = {"name": INTERACTION_NAME}
        self.context = structs.replace(self.context, tools={**known, **tools}, interactions=interactions)
        return started
