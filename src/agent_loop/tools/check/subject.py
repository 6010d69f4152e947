"""The tool under check, and what every check asks of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from agent_loop.errors import ToolError
from agent_loop.runtime.boundary import OnReplay, describe_error, one_line, run_bounded
from agent_loop.testing.checks import CheckFailed
from agent_loop.tools.base import BaseTool
from agent_loop.tools.results import ToolResult, read_result, read_reward

Arguments: TypeAlias = Mapping[str, Any]
END_S = 2.0
"""How long a call that is cancelled may go on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call, as far as two of them can be compared."""

    text: str
    reward: float | None = None
    ends_episode: bool = False
    is_error: bool = False

    def __str__(self) -> str:
        return one_line(
            f"{'error ' if self.is_error else ''}{self.text!r}, reward {self.reward}", max_length=120
        )


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A tool, and how to use it."""

    tool: BaseTool
    calls: Sequence[Arguments]
    create_kwargs: Mapping[str, Any]
    execute_kwargs: Mapping[str, Any]
    _numbers: count[int]

    @property
    def on_replay(self) -> OnReplay:
        return OnReplay(self.tool.on_replay)

    def new_id(self) -> str:
        """The id of an instance in a trajectory of its own."""
        return f"check{next(self._numbers)}-0"

    @asynccontextmanager
    async def created(self) -> AsyncGenerator[str]:
        """A trajectory's instance, released at the end."""
        instance_id = self.new_id()
        try:
            await self.create(instance_id)
            yield instance_id
        finally:
            await self.release(instance_id)

    async def create(self, instance_id: str) -> None:
        await _asked(partial(self.tool.create, instance_id, **self.create_kwargs))

    async def release(self, instance_id: str) -> None:
        await _asked(partial(self.tool.release, instance_id))

    async def verdict(self, instance_id: str) -> float | None:
        """Raises: ToolBug: It is neither a number nor None."""
        verdict = await _asked(partial(self.tool.calc_reward, instance_id))
        return None if verdict is None else read_reward(verdict, where="calc_reward")

    async def result(self, instance_id: str, arguments: Arguments) -> ToolResult:
        """One call.

        Raises:
            ToolError: The tool says that it did not work.
            ToolBug: It returned something that is no result.
        """
        given = json.loads(json.dumps(arguments))
        returned = await _asked(partial(self.tool.execute, instance_id, given, **self.execute_kwargs))
        return read_result(returned, name=self.tool.name)

    async def answer(self, instance_id: str, arguments: Arguments) -> Answer:
        """What the model would be answered.

        Raises:
            CheckFailed: The tool raised something else than `ToolError`.
        """
        try:
            result = await self.result(instance_id, arguments)
        except ToolError as error:
            return Answer(str(error), is_error=True)
        except Exception as error:
            what = one_line(json.dumps(arguments), max_length=120)
            raise CheckFailed(f"called with {what} it raised {describe_error(error)}") from error
        return Answer(result.response.text or "", result.reward, result.response.ends_episode)

    async def conversation(self, calls: Sequence[Arguments] | None = None) -> list[Answer]:
        """The answers to calls of a trajectory of its own, one after the other."""
        async with self.created() as instance_id:
            return [await self.answer(instance_id, arguments) for arguments in calls or self.calls]

    async def is_reproducible(self) -> bool:
        """Whether the same calls get the same answers in another trajectory; nothing can be compared if not."""
        return await self.conversation() == await self.conversation()


async def _asked(function: Callable[[], Awaitable[Any]]) -> Any:
    """What a method returns; one that would end the process raises RuntimeError, and one that will not be cancelled
    is abandoned."""
    return await run_bounded(function, timeout_s=None, grace_s=END_S)


def require_same(got: Sequence[Answer], wanted: Sequence[Answer], what: str) -> None:
    """Fails at the first answer that differs."""
    for number, (mine, its) in enumerate(zip(got, wanted, strict=True), start=1):
        if mine != its:
            raise CheckFailed(f"{what}, call {number} is answered with {mine}, not with {its}")
