"""The tool under check, and what every check asks of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from agent_loop.boundary import OnReplay, describe_error, one_line
from agent_loop.checks import CheckFailed
from agent_loop.errors import ToolError
from agent_loop.tools.base import BaseTool
from agent_loop.tools.session import ToolResult, read_result

Arguments: TypeAlias = Mapping[str, Any]


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
            await self.tool.create(instance_id, **self.create_kwargs)
            yield instance_id
        finally:
            await self.tool.release(instance_id)

    async def result(self, instance_id: str, arguments: Arguments) -> ToolResult:
        """One call.

        Raises:
            ToolError: The tool says that it did not work.
            ToolBug: It returned something that is no result.
        """
        given = json.loads(json.dumps(arguments))
        returned = await self.tool.execute(instance_id, given, **self.execute_kwargs)
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


def require_same(got: Sequence[Answer], wanted: Sequence[Answer], what: str) -> None:
    """Fails at the first answer that differs."""
    for number, (mine, its) in enumerate(zip(got, wanted, strict=True), start=1):
        if mine != its:
            raise CheckFailed(f"{what}, call {number} is answered with {mine}, not with {its}")
