"""Base class of games of one or several players."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.environments.base import MaybeAsync


class Game(ABC):
    """A game that players in numbered seats play in turns. A new instance is created for every rollout.

    All methods may be written with `def` or `async def`. A method with `def` runs in a thread that belongs to this
    instance. The methods of an instance never run at the same time.

    Every method may raise `EnvironmentUnavailable` if something that it depends on cannot be reached. The trajectories
    of all seats then fail without a reward. Any other exception counts as a bug of the game.
    """

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> MaybeAsync[int]:
        """Start the game of a row and return the number of seats. The seats are numbered from 0."""

    @abstractmethod
    def turn(self) -> MaybeAsync[int | None]:
        """Return the seat whose turn it is, or None if the game is over."""

    @abstractmethod
    def observe(self, seat: int) -> MaybeAsync[str]:
        """Return what happened for a seat since it was last observed. Called before each of its turns and at the end.

        The first text of a seat has to explain the game. The seat's own moves need not be repeated.
        """

    @abstractmethod
    def act(self, seat: int, text: str) -> MaybeAsync[None]:
        """Play the text of the seat whose turn it is. The game decides what follows an invalid move."""

    @abstractmethod
    def forfeit(self, seat: int) -> MaybeAsync[None]:
        """End the turn of a seat that can move no more, because a limit ended its trajectory.

        End the game, or go on without the seat. Called again if the seat gets another turn.
        """

    @abstractmethod
    def rewards(self) -> MaybeAsync[Mapping[int, float]]:
        """Return the reward of each seat. Called once, after the end."""

    def legal_moves(self, seat: int) -> MaybeAsync[Sequence[str]]:
        """Return the legal moves of the seat whose turn it is, for the players `random` and `first`."""
        raise NotImplementedError(f"{type(self).__name__} has no method legal_moves")

    def close(self) -> MaybeAsync[None]:
        """Free what the instance holds. Also called if `reset` failed or was cancelled."""
