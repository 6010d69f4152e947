"""Players of seats that the policy does not play: scripted ones, and models on other servers."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agent_loop.config import ChatEndpoint
from agent_loop.errors import ConfigError, DataError, EnvironmentBug, EnvironmentUnavailable, did_you_mean
from agent_loop.loading import import_extra, load_object
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.user_code import call_function
from agent_loop.types import Message

POLICY = "policy"
SCRIPTED = "scripted:"
BUILT_IN = ("random", "first")


@dataclass(frozen=True, slots=True)
class PlayerTurn:
    """A turn of a scripted player."""

    seat: int
    observation: str
    """What happened since the seat's last turn."""
    rng: random.Random
    """Random numbers of this seat, the same whenever the rollout is repeated."""


class Player:
    """Player of a seat."""

    async def move(self, observation: str) -> str | None:
        """Return the seat's move, or None if it can move no more."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free what the player holds."""


class OpponentSettings(ChatEndpoint):
    """Settings of an opponent: a model on another server."""

    system_prompt: str | None = None


class ScriptedPlayer(Player):
    """Plays a random legal move, the first one, or what a function of a `PlayerTurn` returns."""

    def __init__(
        self,
        name: str,
        *,
        seat: int,
        legal_moves: Callable[[], Awaitable[Sequence[str]]],
        rng: random.Random,
    ) -> None:
        self._name = name.removeprefix(SCRIPTED)
        self._function = None if self._name in BUILT_IN else _load_function(name)
        self._legal_moves = legal_moves
        self._seat = seat
        self._rng = rng

    async def move(self, observation: str) -> str:
        if self._function is None:
            moves = await self._legal_moves()
            return self._rng.choice(moves) if self._name == "random" else moves[0]
        turn, where = PlayerTurn(self._seat, observation, self._rng), f"the player of seat {self._seat}"
        try:
            text: Any = await call_function(self._function, turn)
        except EnvironmentUnavailable:
            raise
        except Exception as error:
            raise EnvironmentBug(f"{where} raised {describe_error(error)}; fix it") from error
        if not isinstance(text, str):
            raise EnvironmentBug(f"{where} returned {describe_value(text)}; return a str")
        return text


class ModelPlayer(Player):
    """Plays the replies of a model on another server, which sees the conversation of its seat."""

    def __init__(self, name: str, settings: OpponentSettings) -> None:
        self._name = name
        self._settings = settings
        self._openai = import_extra("openai", extra="simulated-user", by=f"the opponent {name!r}")
        self._client: Any = self._openai.AsyncOpenAI(**settings.client_options())
        prompt = settings.system_prompt
        self._messages: list[Message] = [] if prompt is None else [{"role": "system", "content": prompt}]

    async def move(self, observation: str) -> str:
        settings = self._settings
        messages = [*self._messages, {"role": "user", "content": observation}]
        try:
            completion = await self._client.chat.completions.create(
                messages=messages, **settings.request_options()
            )
            text: Any = completion.choices[0].message.content
        except (self._openai.APIError, ValueError, AttributeError, IndexError, TypeError) as error:
            raise EnvironmentUnavailable(
                f"the opponent {self._name!r} (model {settings.model!r}) returned no move: {describe_error(error)}; "
                "check that the endpoint serves this model"
            ) from error
        text = text if isinstance(text, str) else ""
        self._messages = [*messages, {"role": "assistant", "content": text}]
        return text

    async def close(self) -> None:
        await self._client.close()


def read_players(
    given: Any, *, num_seats: int | None, opponents: Mapping[str, OpponentSettings], where: str
) -> list[str]:
    """Return the player of each seat."""
    names: list[Any] = [given] * (num_seats or 1) if isinstance(given, str) else given
    if not isinstance(given, str | Sequence) or not names:
        raise DataError(
            f"{where} is {describe_value(given)}; give a player, or a list with one for each seat"
        )
    for name in names:
        known = {POLICY, *BUILT_IN, *opponents}
        if isinstance(name, str) and name.startswith(SCRIPTED):
            if name.removeprefix(SCRIPTED) not in BUILT_IN:
                _load_function(name)
        elif name not in known:
            raise DataError(f"{where}: there is no player {name!r}{did_you_mean(str(name), known)}")
    if POLICY not in names:
        raise DataError(f"{where} is {list(names)}: the policy has no seat; name {POLICY!r} at least once")
    if num_seats is not None and len(names) != num_seats:
        raise DataError(
            f"{where} has {len(names)} players, and the game has {num_seats} seats; give one for each"
        )
    return [str(name) for name in names]


def _load_function(name: str) -> Callable[[PlayerTurn], Any]:
    function: Any = load_object(name.removeprefix(SCRIPTED), key=f"players: {name}")
    if not callable(function):
        raise ConfigError(f"players: {name} is {describe_value(function)}; name a function")
    return cast("Callable[[PlayerTurn], Any]", function)
