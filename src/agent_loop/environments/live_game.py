"""The game of one rollout, whose methods are bounded in time and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.game import Game
from agent_loop.environments.method_calls import call_method, run_method
from agent_loop.errors import DataError, EnvironmentBug
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.numeric import as_reward
from agent_loop.runtime.threads import OneThread


class LiveGame:
    """Game of one rollout.

    Args:
        factory: Creates the game when `reset` is called.
        timeout_s: Time limit of each method.

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
        num_seats = await self._call("reset", row)
        if type(num_seats) is not int or num_seats < 1:
            raise self._wrong("reset", num_seats, "the number of seats")
        self._num_seats = num_seats
        return num_seats

    async def turn(self) -> int | None:
        """Return the seat whose turn it is, or None if the game is over."""
        seat = await self._call("turn")
        if seat is not None and (type(seat) is not int or not 0 <= seat < self._num_seats):
            raise self._wrong("turn", seat, f"a seat from 0 to {self._num_seats - 1}, or None")
        return seat

    async def observe(self, seat: int) -> str:
        """Return what happened for a seat."""
        text = await self._call("observe", seat)
        if not isinstance(text, str):
            raise self._wrong("observe", text, "a str")
        return text

    async def act(self, seat: int, text: str) -> None:
        """Play the text of a seat."""
        await self._call("act", seat, text)

    async def forfeit(self, seat: int) -> None:
        """End the turn of a seat that can move no more."""
        await self._call("forfeit", seat)

    async def legal_moves(self, seat: int) -> Sequence[str]:
        """Return the legal moves of a seat, at least one."""
        moves: Any = await self._call("legal_moves", seat)
        is_sequence = isinstance(moves, Sequence) and not isinstance(moves, str)
        if not is_sequence or not moves or not all(isinstance(move, str) for move in cast(list[Any], moves)):
            raise self._wrong("legal_moves", moves, "a list of str that is not empty")
        return cast(Sequence[str], moves)

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
                await call_method(self._game.close, self._thread)
        finally:
            self._thread.shutdown()

    async def _call(self, method: str, *args: Any) -> Any:
        what = f"{method} of {self.where}"
        call = partial(call_method, getattr(self._game, method), self._thread, *args)
        return await run_method(call, what=what, timeout_s=self._timeout_s, key="interaction_timeout_s")

    def _wrong(self, method: str, value: Any, expected: str) -> EnvironmentBug:
        return EnvironmentBug(f"{method} of {self.where} returned {describe_value(value)}; return {expected}")

    @cached_property
    def _thread(self) -> OneThread:
        return OneThread("game")
