"""Forecasts of the work left in a session. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Protocol

PRIOR_TURNS = 4.0
"""Weight of the prior, in sessions. The prior is that half of the sessions have another turn after each turn."""
FORECAST_EVERY = 256
"""Number of begun turns and ended sessions after which the forecast is computed again."""


class Forecast(Protocol):
    """Interface of forecasts of the work left in a session. Any unit is allowed; only comparisons count."""

    def begin_turn(self, session: str) -> float:
        """Note that a session's next turn begins. Return the work left in the session, this turn included."""
        ...

    def end(self, session: str) -> None:
        """Note that no turn of the session will follow."""
        ...


class RemainingTurnsForecast:
    """Expected remaining turns by the number of turns done, learned from the sessions so far. Implements `Forecast`.

    For each number of turns, the forecast counts the sessions that had another turn and the sessions that ended. The
    product of the shares that continued is the probability of each further turn. Running sessions count for the turns
    that they have begun; otherwise short sessions, which end first, would bias the forecast.
    """

    def __init__(self) -> None:
        self._turns_begun: dict[str, int] = {}
        self._num_continued: list[int] = [0]
        """Number of sessions that began another turn, by the number of turns done."""
        self._num_ended: list[int] = [0]
        """Number of sessions that ended, by the number of turns done."""
        self._remaining: list[float] = [1.0]
        """Expected remaining turns, by the number of turns done."""
        self._num_noted = 0

    def begin_turn(self, session: str) -> float:
        done = self._turns_begun.get(session, 0)
        self._turns_begun[session] = done + 1
        if done + 1 == len(self._num_continued):
            self._num_continued.append(0)
            self._num_ended.append(0)
        self._num_continued[done] += 1
        self._note()
        return self._remaining[min(done, len(self._remaining) - 1)]

    def end(self, session: str) -> None:
        done = self._turns_begun.pop(session, None)
        if done is not None:
            self._num_ended[done] += 1
            self._note()

    def _note(self) -> None:
        if self._num_noted % FORECAST_EVERY == 0:
            self._remaining = self._expected()
        self._num_noted += 1

    def _expected(self) -> list[float]:
        """Return the mean number of turns from the next turn on, by turns done, given that there is a next turn."""
        expected, remaining = [1.0] * len(self._num_continued), 1.0
        for done in range(len(self._num_continued) - 1, -1, -1):
            expected[done] = 1.0 + remaining
            known = self._num_continued[done] + self._num_ended[done]
            share_continued = (self._num_continued[done] + PRIOR_TURNS / 2) / (known + PRIOR_TURNS)
            remaining = share_continued * expected[done]
        return expected
