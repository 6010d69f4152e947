"""The environment of one running trajectory, and the game of one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

from agent_loop.config import MultiTurnConfig
from agent_loop.environments.base import Environment, EnvironmentTool, Reply
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.game import Game
from agent_loop.environments.interaction import InteractionEnvironment
from agent_loop.environments.trl import with_observation
from agent_loop.errors import ConfigError, DataError, EnvironmentBug, EnvironmentUnavailable, RewardError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.rewards.function import Score, read_score
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, DeadlineExpired
from agent_loop.runtime.numeric import REWARD_LIMIT, as_reward
from agent_loop.runtime.threads import OneThread
from agent_loop.runtime.user_code import run_bounded
from agent_loop.runtime.user_values import plain_mapping
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.schema import check_tool_schema
from agent_loop.trajectory import Incident, IncidentKind
from agent_loop.trajectory.copying import copied
from agent_loop.types import Message

LiveT = TypeVar("LiveT", bound=Environment | Game)
TimeLimitKey = Literal["interaction_timeout_s", "close_timeout_s"]


class Live(Generic[LiveT]):
    """Environment or game of one rollout. Its methods run one after the other.

    A method that is called within a time limit raises `EnvironmentBug` if the environment raised, took too long, or
    returned something else than it should, and `EnvironmentUnavailable` and `DataError` as the environment raised them.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        kind: type[LiveT],
        *,
        limits: MultiTurnConfig | None,
        otherwise: str,
    ) -> None:
        self.where = factory.where
        self._kind = kind
        self._otherwise = otherwise
        self._make = factory.make
        self._limits = limits or MultiTurnConfig()
        self._made: LiveT | None = None
        self._is_closed = False
        self._lock = asyncio.Lock()
        self._thread = OneThread("environment")

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method, without a time limit, and return its result."""
        if self._made is None or self._is_closed:
            raise EnvironmentBug(f"{self.where} is used before its reset, or after its close")
        async with self._lock:
            return await self._thread.call(getattr(self._made, method), *args)

    async def close(self) -> list[Incident]:
        """Close the environment once, if it was created, and return what went wrong. Shielded from cancellation."""
        if self._is_closed:
            return []
        self._is_closed = True
        try:
            if self._made is None:
                return []
            # Without the lock, which a call that was abandoned may hold.
            close = partial(self._thread.call, self._made.close)
            return await run_close(close, what=self.where, timeout_s=self._limits.close_timeout_s)
        finally:
            self._thread.shutdown()

    async def _call(
        self,
        method: str,
        *args: Any,
        returns: str = "",
        is_right: Callable[[Any], bool] = lambda _: True,
        key: TimeLimitKey = "interaction_timeout_s",
    ) -> Any:
        """Call a method within a time limit, and return its result, which has to be `returns`, as `is_right` tells."""
        what, timeout_s = f"{method} of {self.where}", float(getattr(self._limits, key))
        call = partial(self._reset, *args) if method == "reset" else partial(self.call, method, *args)
        try:
            value = await run_bounded(call, timeout_s=timeout_s, name=what)
        except (EnvironmentBug, EnvironmentUnavailable, DataError):
            raise
        except DeadlineExpired as error:
            raise EnvironmentBug(f"{what} {error}; fix it, or raise rollout.multi_turn.{key}") from error
        except Exception as error:
            raise EnvironmentBug(f"{what} raised {describe_error(error)}; fix it") from error
        if not is_right(value):
            raise self._wrong(method, value, returns)
        return value

    async def _reset(self, row: Mapping[str, Any]) -> Any:
        if self._made is None:
            made = await self._thread.run(self._make)
            if not isinstance(made, self._kind):
                raise DataError(f"{self.where} is {self._otherwise}")
            self._made = made
        return await self.call("reset", row)

    def _wrong(self, method: str, value: Any, expected: str) -> EnvironmentBug:
        return EnvironmentBug(f"{method} of {self.where} returned {describe_value(value)}; return {expected}")


class LiveEnvironment(Live[Environment]):
    """Environment of one trajectory, which is reset at its first use."""

    interaction: BaseInteraction | None = None
    """The interaction, if the environment is one. An episode scores and closes its interaction, and gives each branch
    one of its own. The loop does this for all other environments."""

    def __init__(
        self, factory: EnvironmentFactory, *, row: Mapping[str, Any], limits: MultiTurnConfig | None = None
    ) -> None:
        otherwise = "a game of players in turns; set agent_name to game_agent"
        super().__init__(factory, Environment, limits=limits, otherwise=otherwise)
        self._row = row
        self._start: str | list[Message] | None = None
        self._is_started = self._is_ready = False

    @classmethod
    def of_interaction(
        cls, interaction: BaseInteraction, *, row: Mapping[str, Any], limits: MultiTurnConfig | None = None
    ) -> LiveEnvironment:
        """Return the interaction of one trajectory. See `InteractionEnvironment` for the row."""
        make = partial(InteractionEnvironment, interaction)
        live = cls(
            EnvironmentFactory(make, where=f"interaction {interaction.name!r}"), row=row, limits=limits
        )
        live.interaction, live._made = interaction, make()
        return live

    def fresh(self, *, trajectory: str) -> LiveEnvironment:
        """Return the environment of a branch of the episode: a new interaction, or else the same environment."""
        if self.interaction is None:
            return self
        row = {**self._row, "trajectory": trajectory}
        return LiveEnvironment.of_interaction(self.interaction, row=row, limits=self._limits)

    @property
    def environment(self) -> Environment:
        """The environment. Valid after its reset."""
        assert self._made is not None
        return self._made

    @property
    def is_open(self) -> bool:
        """Whether the environment was used and not closed."""
        return self._is_started and not self._is_closed

    @property
    def replies(self) -> bool:
        """Whether the environment replies to turns that call no tool."""
        return type(self.environment).reply is not Environment.reply

    @property
    def on_replay(self) -> OnReplay:
        """How recorded replies are used when the trajectory runs again."""
        return OnReplay(self.environment.on_replay)

    async def open(self) -> None:
        """Reset the environment, unless that was done before."""
        if self._is_ready:
            return
        if self._is_started:
            raise EnvironmentBug(f"{self.where} is used after its reset failed")
        self._is_started = True
        self._start = await self._call(
            "reset", self._row, returns="a str, a list of messages, or None", is_right=_is_start
        )
        self._is_ready = True

    async def prompt(self) -> list[Message]:
        """Return the prompt after the reset."""
        await self.open()
        return (
            self._start
            if isinstance(self._start, list)
            else with_observation(self._row["raw_prompt"], self._start)
        )

    async def greet(self) -> Reply:
        """Return the text with which an interaction opens the conversation, which is empty if there is none."""
        await self.open()
        return Reply(str(self._start or ""))

    async def tools(self) -> dict[str, BaseTool]:
        """Return the environment's tools by name."""
        tools: dict[str, BaseTool] = {}
        for tool in cast(Sequence[EnvironmentTool], await self._call("tools")):
            try:
                check_tool_schema(tool.schema, where=self.where)
            except ConfigError as error:
                raise EnvironmentBug(str(error)) from error
            if tool.name in tools:
                raise EnvironmentBug(f"{self.where} has two tools named {tool.name!r}; rename one of them")
            tools[tool.name] = _ToolOfEnvironment(self, tool)
        return tools

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Return the environment's reply to the conversation."""
        await self.open()
        reply = await self._call(
            "reply",
            copied(list(messages)),
            returns="a Reply",
            is_right=lambda value: isinstance(value, Reply),
        )
        return check_reply(reply, where=f"reply of {self.where}")

    async def reward(self, messages: Sequence[Message]) -> Score | None:
        """Return the environment's reward, or None if it has none or was never reset."""
        if not self._is_ready:
            return None
        returned = await self._call("reward", messages, key="close_timeout_s")
        try:
            return None if returned is None else read_score(returned, source=f"reward of {self.where}")
        except RewardError as error:
            raise EnvironmentBug(str(error)) from error


def check_reply(reply: Reply, *, where: str) -> Reply:
    """Return a reply whose values have the right types."""
    for name, kind in (("is_over", bool), ("content", str), ("extra", dict)):
        value: Any = getattr(reply, name)
        if not isinstance(value, kind):
            raise EnvironmentBug(
                f"{where} returned {describe_value(value)} as {name}; return a {kind.__name__}"
            )
    score = as_reward(reply.score)
    if score is None:
        raise EnvironmentBug(
            f"{where} returned {describe_value(reply.score)} as its score; return a finite number {REWARD_LIMIT}"
        )
    extra = plain_mapping(reply.extra, where=f"extra of {where}")
    return replace(reply, content=str.__str__(reply.content), score=score, extra=extra)


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


def _is_start(value: Any) -> bool:
    """Return whether `reset` returned a value of the right form."""
    if not isinstance(value, list):
        return isinstance(value, str | None)
    return all(
        isinstance(message, dict) and "role" in message and "content" in message
        for message in cast(list[Any], value)
    )


def _are_moves(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(cast(Any, value)) > 0
    return is_list and all(isinstance(move, str) for move in cast(Sequence[Any], value))


class LiveGame(Live[Game]):
    """Game of one rollout."""

    def __init__(self, factory: EnvironmentFactory, *, limits: MultiTurnConfig) -> None:
        otherwise = "not a game; set agent_name to environment_agent, or name a game"
        super().__init__(factory, Game, limits=limits, otherwise=otherwise)
        self._num_seats = 0

    async def reset(self, row: Mapping[str, Any]) -> int:
        """Create the game, start it, and return the number of seats."""
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
            expected = f"a finite number for each seat from 0 to {self._num_seats - 1}"
            raise self._wrong("rewards", given, expected)
        return found


async def run_close(close: Callable[[], Awaitable[object]], *, what: str, timeout_s: float) -> list[Incident]:
    """Await a `close`, shielded from cancellation, and return what went wrong."""
    bounded = partial(run_bounded, close, timeout_s=timeout_s, name=f"closing {what}")
    try:
        with waiting_for(WaitKind.CLOSE, what):
            await run_shielded(bounded, timeout_s=timeout_s + 2 * ABANDON_GRACE_S)
    except Exception as error:  # noqa: BLE001  (close boundary: named in the record)
        return [Incident(IncidentKind.CLOSE_FAILED, f"closing {what}: {describe_error(error)}")]
    return []
