"""The environment of one running trajectory, and the game of one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from agent_loop.environments.base import Environment, EnvironmentTool, Reply
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.game import Game
from agent_loop.environments.trl import with_observation
from agent_loop.errors import (
    ConfigError,
    DataError,
    EnvironmentBug,
    EnvironmentUnavailable,
    InteractionBug,
    RewardError,
)
from agent_loop.interactions.base import BaseInteraction
from agent_loop.rewards.function import Score, read_score
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, DeadlineExpired
from agent_loop.runtime.numeric import as_reward
from agent_loop.runtime.threads import OneThread
from agent_loop.runtime.user_code import run_bounded
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.schema import check_tool_schema
from agent_loop.types import Message

ResultT = TypeVar("ResultT")


class LiveEnvironment:
    """Environment of one trajectory. Its methods run one after the other."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self.where = factory.where
        self._make = factory.make
        self._environment: Environment | None = None
        self._lock = asyncio.Lock()

    @property
    def environment(self) -> Environment:
        """The environment."""
        if self._environment is None:
            raise EnvironmentBug(f"{self.where} is used before its reset")
        return self._environment

    @property
    def replies(self) -> bool:
        """Whether the environment replies to turns that call no tool."""
        return type(self.environment).reply is not Environment.reply

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Create the environment, start the trajectory of a row, and return its prompt."""
        environment = await self._thread.run(self._make)
        if not isinstance(environment, Environment):
            raise DataError(f"{self.where} is a game of players in turns; set agent_name to game_agent")
        self._environment = environment
        start = await self.call("reset", row)
        if start is None or isinstance(start, str):
            return with_observation(row["raw_prompt"], start)
        if _are_messages(start):
            return cast(list[Message], start)
        raise EnvironmentBug(
            f"reset of {self.where} returned {describe_value(start)}; return a str, a list of messages, or None"
        )

    async def tools(self) -> dict[str, BaseTool]:
        """Return the environment's tools by name."""
        tools: dict[str, BaseTool] = {}
        for tool in cast(Sequence[EnvironmentTool], await self.call("tools")):
            try:
                check_tool_schema(tool.schema, where=self.where)
            except ConfigError as error:
                raise EnvironmentBug(str(error)) from error
            if tool.name in tools:
                raise EnvironmentBug(f"{self.where} has two tools named {tool.name!r}; rename one of them")
            tools[tool.name] = _ToolOfEnvironment(self, tool)
        return tools

    def interaction(self, *, name: str) -> BaseInteraction:
        """Return the environment's replies as an interaction."""
        return _RepliesOfEnvironment(self, name=name)

    async def reward(self, messages: Sequence[Message]) -> Score | None:
        """Return the environment's reward, or None if it has none."""
        returned = await self.call("reward", messages)
        try:
            return None if returned is None else read_score(returned, source=f"reward of {self.where}")
        except RewardError as error:
            raise EnvironmentBug(str(error)) from error

    async def close(self) -> None:
        """Close the environment, if it was created, and end its thread."""
        try:
            if self._environment is not None:
                await self.call("close")
        finally:
            self._thread.shutdown()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the environment and return its result."""
        function: Callable[..., Any] = getattr(self.environment, method)
        async with self._lock:
            return await self._thread.call(function, *args)

    @cached_property
    def _thread(self) -> OneThread:
        return OneThread("environment")


class _ToolOfEnvironment(BaseTool):
    """A tool of one trajectory's environment."""

    def __init__(self, live: LiveEnvironment, tool: EnvironmentTool) -> None:
        super().__init__({}, tool.schema)
        self.on_replay = OnReplay(live.environment.on_replay)
        self.is_shown = tool.is_shown
        self.check_arguments = tool.check_arguments
        self._live = live

    @property
    def is_read_later(self) -> bool:
        """True: the environment's reward is read at the end."""
        return True

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        response: Any = await self._live.call("call", self.name, parameters)
        if not isinstance(response, ToolResponse):
            response = ToolResponse(text=str(response))
        return response, None, {}


class _RepliesOfEnvironment(BaseInteraction):
    """The replies of one trajectory's environment."""

    def __init__(self, live: LiveEnvironment, *, name: str) -> None:
        super().__init__({"name": name})
        self.on_replay = OnReplay(live.environment.on_replay)
        self._live = live

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        reply: Any = await self._live.call("reply", messages)
        if not isinstance(reply, Reply):
            raise InteractionBug(
                f"reply of {self._live.where} returned {describe_value(reply)}; return a Reply"
            )
        return reply.is_over, reply.content, reply.score, dict(reply.extra)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message and "content" in message
        for message in cast(list[Any], value)
    )


def _are_moves(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(cast(Any, value)) > 0
    return is_list and all(isinstance(move, str) for move in cast(Sequence[Any], value))


class LiveGame:
    """Game of one rollout.

    All methods raise `EnvironmentBug` if the game's method raised, took too long, or returned something else than it
    should, and `EnvironmentUnavailable` and `DataError` as the game raised them.
    """

    def __init__(self, factory: EnvironmentFactory, *, timeout_s: float) -> None:
        self.where = factory.where
        self._make = factory.make
        self._timeout_s = timeout_s
        self._game: Game | None = None
        self._num_seats = 0

    async def reset(self, row: Mapping[str, Any]) -> int:
        """Create the game, start it, and return the number of seats."""
        game: Any = await self._thread.run(self._make)
        if not isinstance(game, Game):
            raise DataError(
                f"{self.where} is not a game; set agent_name to environment_agent, or name a game"
            )
        self._game = game
        self._num_seats = await self._call(
            "reset",
            row,
            returns="the number of seats",
            is_right=lambda value: type(value) is int and value > 0,
        )
        return self._num_seats

    async def turn(self) -> int | None:
        """Return the seat whose turn it is, or None if the game is over."""
        seats = range(self._num_seats)
        return await self._call(
            "turn",
            returns=f"a seat from 0 to {len(seats) - 1}, or None",
            is_right=lambda seat: seat is None or (type(seat) is int and seat in seats),
        )

    async def observe(self, seat: int) -> str:
        """Return what happened for a seat."""
        return await self._call("observe", seat, returns="a str", is_right=lambda text: isinstance(text, str))

    async def act(self, seat: int, text: str) -> None:
        """Play the text of a seat."""
        await self._call("act", seat, text)

    async def forfeit(self, seat: int) -> None:
        """End the turn of a seat that can move no more."""
        await self._call("forfeit", seat)

    async def legal_moves(self, seat: int) -> Sequence[str]:
        """Return the legal moves of a seat, at least one."""
        return await self._call(
            "legal_moves", seat, returns="a list of str that is not empty", is_right=_are_moves
        )

    async def rewards(self) -> dict[int, float]:
        """Return the reward of each seat."""
        given: Any = await self._call("rewards")
        values: Mapping[Any, Any] = cast(Any, given) if isinstance(given, Mapping) else {}
        rewards = {seat: as_reward(values.get(seat)) for seat in range(self._num_seats)}
        found = {seat: reward for seat, reward in rewards.items() if reward is not None}
        if len(found) < self._num_seats:
            raise self._wrong(
                "rewards", given, f"a finite number for each seat from 0 to {self._num_seats - 1}"
            )
        return found

    async def close(self) -> None:
        """Close the game, if it was created, and end its thread."""
        try:
            if self._game is not None:
                await self._thread.call(self._game.close)
        finally:
            self._thread.shutdown()

    async def _call(
        self, method: str, *args: Any, returns: str = "", is_right: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        """Call a method and return its result, which has to be `returns`, as `is_right` tells."""
        what = f"{method} of {self.where}"
        call = partial(self._thread.call, getattr(self._game, method), *args)
        value = await run_method(call, what=what, timeout_s=self._timeout_s, key="interaction_timeout_s")
        if not is_right(value):
            raise self._wrong(method, value, returns)
        return value

    def _wrong(self, method: str, value: Any, expected: str) -> EnvironmentBug:
        return EnvironmentBug(f"{method} of {self.where} returned {describe_value(value)}; return {expected}")

    @cached_property
    def _thread(self) -> OneThread:
        return OneThread("game")


async def run_method(
    function: Callable[[], Awaitable[ResultT]], *, what: str, timeout_s: float, key: str
) -> ResultT:
    """Await a method of an environment or a game."""
    try:
        return await run_bounded(function, timeout_s=timeout_s, name=what)
    except (EnvironmentBug, EnvironmentUnavailable, DataError):
        raise
    except DeadlineExpired as error:
        raise EnvironmentBug(f"{what} {error}; fix it, or raise rollout.multi_turn.{key}") from error
    except Exception as error:
        raise EnvironmentBug(f"{what} raised {describe_error(error)}; fix it") from error


async def run_close(close: Callable[[], Awaitable[object]], *, what: str, timeout_s: float) -> list[str]:
    """Await a `close`, shielded from cancellation, and return what went wrong."""
    bounded = partial(run_bounded, close, timeout_s=timeout_s, name=f"closing {what}")
    try:
        await run_shielded(bounded, timeout_s=timeout_s + 2 * ABANDON_GRACE_S)
    except Exception as error:  # noqa: BLE001  (close boundary: named in the record)
        return [f"closing {what}: {describe_error(error)}"]
    return []
