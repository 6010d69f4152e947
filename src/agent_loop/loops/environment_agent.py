"""The loop of environments: the environment provides the tools, the first observation and the reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from msgspec import structs

from agent_loop.episode import EpisodeStopped
from agent_loop.errors import DataError, EnvironmentBug, did_you_mean
from agent_loop.loops.environments import Environment, EnvironmentFactory, with_observation
from agent_loop.loops.registry import register
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind
from agent_loop.types import StopReason

ResultT = TypeVar("ResultT")


@register("environment_agent")
class EnvironmentAgentLoop(ToolAgentLoop):
    """A tool loop whose tools are the methods of an environment. Every trajectory has its own environment.

    The row's `environment` names one of `rollout.multi_turn.environments`; it is optional if there is only one. The
    environment's reward becomes the trajectory's reward, also if a limit ended the trajectory.
    """

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        environment = self._factory(row.get("environment")).new()
        problems: list[str] = []
        try:
            output = await self._play(environment, sampling_params, row)
        finally:
            problems += await self._close(environment)
        for problem in problems:
            output = output.noted(Incident(IncidentKind.CLOSE_FAILED, problem))
        return output

    async def _play(
        self, environment: Environment, sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        config = self.context.multi_turn
        observation = await _bounded(
            partial(environment.reset, row),
            what=f"reset of {environment.where}",
            timeout_s=config.interaction_timeout_s,
            key="interaction_timeout_s",
        )
        self._add_tools(environment)
        prompt = with_observation(row["raw_prompt"], observation)
        try:
            output = await super().run(sampling_params, **{**row, "raw_prompt": prompt})
        except EpisodeStopped as stopped:
            output = cast(AgentLoopOutput, self.unfinished_output(stopped.reason))
        if output.stop_reason is StopReason.CANCELLED:
            return output
        reward = await _bounded(
            environment.reward,
            what=f"get_reward of {environment.where}",
            timeout_s=config.close_timeout_s,
            key="close_timeout_s",
        )
        return output if reward is None else replace(output, reward_score=reward)

    def _add_tools(self, environment: Environment) -> None:
        tools = environment.tools
        taken = sorted(tools.keys() & self.context.tools.keys())
        if taken:
            raise DataError(
                f"{environment.where} has a method {taken[0]!r}, and there is a tool of that name; rename one of them"
            )
        self.context = structs.replace(self.context, tools={**self.context.tools, **tools})

    async def _close(self, environment: Environment) -> list[str]:
        """Close the environment, shielded from cancellation, and return what went wrong."""
        timeout_s = self.context.multi_turn.close_timeout_s
        try:
            what = f"closing {environment.where}"
            close = partial(run_bounded, environment.close, timeout_s=timeout_s, name=what)
            await run_shielded(close, timeout_s=timeout_s + 2 * ABANDON_GRACE_S)
        except Exception as error:  # noqa: BLE001  (close boundary: named in the record)
            return [f"closing {environment.where}: {describe_error(error)}"]
        return []

    def _factory(self, name: Any) -> EnvironmentFactory:
        known = self.context.environments
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        if name is None or str(name) not in known:
            near = did_you_mean(str(name), known) or "; name one in rollout.multi_turn.environments"
            raise DataError(f"environment is {name!r}: no such environment{near}")
        return known[str(name)]


async def _bounded(
    function: Callable[[], Awaitable[ResultT]], *, what: str, timeout_s: float, key: str
) -> ResultT:
    try:
        return await run_bounded(function, timeout_s=timeout_s, name=what)
    except EnvironmentBug:
        raise
    except DeadlineExpired as error:
        raise EnvironmentBug(f"{what} {error}; fix it, or raise rollout.multi_turn.{key}") from error
    except Exception as error:
        raise EnvironmentBug(f"{what} raised {describe_error(error)}; fix it") from error
