"""The loop of environments: the environment provides the tools, the replies and the reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from msgspec import structs

from agent_loop.environments.base import Environment
from agent_loop.environments.factory import find_environment
from agent_loop.environments.live import LiveEnvironment
from agent_loop.episode import EpisodeStopped
from agent_loop.errors import DataError, EnvironmentBug, EnvironmentUnavailable
from agent_loop.loops.registry import register
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind
from agent_loop.types import StopReason

ResultT = TypeVar("ResultT")
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
            problems += await self._close(live)
        for problem in problems:
            output = output.noted(Incident(IncidentKind.CLOSE_FAILED, problem))
        return output

    async def _play(
        self, live: LiveEnvironment, sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        config = self.context.multi_turn
        start = partial(self._start, live, row)
        row = await _bounded(
            start,
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
        score = await _bounded(
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

    async def _close(self, live: LiveEnvironment) -> list[str]:
        """Close the environment, shielded from cancellation, and return what went wrong."""
        timeout_s = self.context.multi_turn.close_timeout_s
        try:
            what = f"closing {live.where}"
            close = partial(run_bounded, live.close, timeout_s=timeout_s, name=what)
            await run_shielded(close, timeout_s=timeout_s + 2 * ABANDON_GRACE_S)
        except Exception as error:  # noqa: BLE001  (close boundary: named in the record)
            return [f"closing {live.where}: {describe_error(error)}"]
        return []


async def _bounded(
    function: Callable[[], Awaitable[ResultT]], *, what: str, timeout_s: float, key: str
) -> ResultT:
    try:
        return await run_bounded(function, timeout_s=timeout_s, name=what)
    except (EnvironmentBug, EnvironmentUnavailable, DataError):
        raise
    except DeadlineExpired as error:
        raise EnvironmentBug(f"{what} {error}; fix it, or raise rollout.multi_turn.{key}") from error
    except Exception as error:
        raise EnvironmentBug(f"{what} raised {describe_error(error)}; fix it") from error
