"""Tool under check, with the calls that the checks make."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from agent_loop.errors import ToolError
from agent_loop.runtime.describe import describe_error, one_line
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.user_code import run_bounded
from agent_loop.testing.conformance import CheckFailed
from agent_loop.tools.base import BaseTool
from agent_loop.tools.results import ToolResult, read_result, read_reward

Arguments: TypeAlias = Mapping[str, Any]
END_S = 2.0
"""Seconds in which a cancelled call must end."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """Comparable part of what a call returned."""

    text: str
    reward: float | None = None
    ends_episode: bool = False
    is_error: bool = False

    def __str__(self) -> str:
        return one_line(
            f"{'error ' if self.is_error else ''}{self.text!r}, reward {self.reward}", max_length=120
        )


@dataclass(frozen=True, slots=True, eq=False)
class CheckedTool:
    """Tool under check, and the arguments to call it with."""

    tool: BaseTool
    calls: Sequence[Arguments]
    create_kwargs: Mapping[str, Any]
    execute_kwargs: Mapping[str, Any]
    _numbers: count[int]

    @property
    def on_replay(self) -> OnReplay:
        return OnReplay(self.tool.on_replay)

    def new_id(self) -> str:
        """Return a new instance id."""
        return f"check{next(self._numbers)}-0"

    @asynccontextmanager
    async def created(self) -> AsyncGenerator[str]:
        """Create an instance, yield its id, and release it at the end."""
        instance_id = self.new_id()
        try:
            await self.create(instance_id)
            yield instance_id
        finally:
            await self.release(instance_id)

    async def create(self, instance_id: str) -> None:
        await _bounded(partial(self.tool.create, instance_id, **self.create_kwargs))

    async def release(self, instance_id: str) -> None:
        await _bounded(partial(self.tool.release, instance_id))

    async def calc_reward(self, instance_id: str) -> float | None:
        """Return the reward of a trajectory.

        Raises:
            ToolBug: `calc_reward` returned neither a finite number nor None.
        """
        reward = await _bounded(partial(self.tool.calc_reward, instance_id))
        return None if reward is None else read_reward(reward, where="calc_reward")

    async def execute(self, instance_id: str, arguments: Arguments) -> ToolResult:
        """Call the tool and return its result.

        Raises:
            ToolError: The tool reports that the call failed.
            ToolBug: The tool returned something else than a result.
        """
        given = json.loads(json.dumps(arguments))
        returned = await _bounded(partial(self.tool.execute, instance_id, given, **self.execute_kwargs))
        return read_result(returned, name=self.tool.name)

    async def call(self, instance_id: str, arguments: Arguments) -> CallResult:
        """Call the tool and return the result in a form that can be compared. A `ToolError` is a result.

        Raises:
            CheckFailed: The tool raised another exception than `ToolError`.
        """
        try:
            result = await self.execute(instance_id, arguments)
        except ToolError as error:
            return CallResult(str(error), is_error=True)
        except Exception as error:
            what = one_line(json.dumps(arguments), max_length=120)
            raise CheckFailed(f"called with {what}, it raised {describe_error(error)}") from error
        return CallResult(result.response.text or "", result.reward, result.response.ends_episode)

    async def run_trajectory(self, calls: Sequence[Arguments] | None = None) -> list[CallResult]:
        """Make calls one after the other in a new trajectory, and return their results."""
        async with self.created() as instance_id:
            return [await self.call(instance_id, arguments) for arguments in calls or self.calls]

    async def is_reproducible(self) -> bool:
        """Return whether the same calls have the same results in another trajectory."""
        return await self.run_trajectory() == await self.run_trajectory()


async def _bounded(function: Callable[[], Awaitable[Any]]) -> Any:
    """Await a method of the tool. `SystemExit` becomes RuntimeError, and a method that ignores a cancellation is
    abandoned."""
    return await run_bounded(function, timeout_s=None, grace_s=END_S)


def require_same(got: Sequence[CallResult], wanted: Sequence[CallResult], what: str) -> None:
    """Fail the check at the first result that differs."""
    for number, (one, other) in enumerate(zip(got, wanted, strict=True), start=1):
        if one != other:
            raise CheckFailed(f"{what}, call {number} returns {one}, not {other}")
