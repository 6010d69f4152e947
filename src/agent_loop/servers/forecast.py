"""How much a session has left to do. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Protocol

PRIOR_TURNS = 4.0
"""Before much is known, half of the sessions go on after each turn, with the weight of so many of them."""
FORECAST_EVERY = 256
"""Turns and ends after which the forecast is made anew."""


class Forecast(Protocol):
    """Tells for each turn how much its session has left; only comparisons count."""

    def begin_turn(self, session: str) -> float:
        """A session's next turn begins: what is expected of it from here on, this turn included."""
        ...

    def end(self, session: str) -> None:
        """No turn of the session will follow."""
        ...


class TurnsLeft:
    """Turns yet to come by turns done, learnt from the sessions so far. Implements `Forecast`.

    Of the sessions whose fate after so many turns is known, some went on and some ended; the product of those shares
    tells how likely each further turn is. Sessions that still run count for the turns that they have begun, so that
    the short ones, which end first, do not bias it.
    """

    def __init__(self) -> None:
        self._turns_begun: dict[str, int] = {}
        self._went_on: list[int] = [0]
        """By turns done: sessions that began another one."""
        self._ended: list[int] = [0]
        self._left: list[float] = [1.0]
        self._num_noted = 0

    def begin_turn(self, session: str) -> float:
        done = self._turns_begun.get(session, 0)
        self._turns_begun[session] = done + 1
        if done + 1 == len(self._went_on):
            self._went_on.append(0)
            self._ended.append(0)
        self._went_on[done] += 1
        self._note()
        return self._left[min(done, len(self._left) - 1)]

    def end(self, session: str) -> None:
        done = self._turns_begun.pop(session, None)
        if done is not None:
            self._ended[done] += 1
            self._note()

    def _note(self) -> None:
        if self._num_noted % FORECAST_EVERY == 0:
            self._left = self._expected()
        self._num_noted += 1

    def _expected(self) -> list[float]:
        """By turns done, the mean number of turns from the next one on, given that there is a next one."""
        expected, left = [1.0] * len(self._went_on), 1.0
        for done in range(len(self._went_on) - 1, -1, -1):
            expected[done] = 1.0 + left
            known = self._went_on[done] + self._ended[done]
            goes_on = (self._went_on[done] + PRIOR_TURNS / 2) / (known + PRIOR_TURNS)
            left = goes_on * expected[done]
        return expected
