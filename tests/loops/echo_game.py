"""A game in which every text is a legal move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_loop.environments.game import Game

NUM_ROUNDS = 2


class EchoGame(Game):
    """Two seats say something in turns, and hear each other. The longer texts win."""

    def reset(self, row: Mapping[str, Any]) -> int:
        self.texts: list[list[str]] = [[], []]
        self.loser: int | None = None
        return 2

    def turn(self) -> int | None:
        num_texts = sum(map(len, self.texts))
        return None if self.loser is not None or num_texts == 2 * NUM_ROUNDS else num_texts % 2

    def observe(self, seat: int) -> str:
        theirs = self.texts[1 - seat]
        return f"The other seat said {' '.join(theirs[-1].split()) or 'nothing'}." if theirs else "Begin."

    def act(self, seat: int, text: str) -> None:
        self.texts[seat].append(text)

    def forfeit(self, seat: int) -> None:
        self.loser = seat

    def rewards(self) -> dict[int, float]:
        if self.loser is not None:
            return {seat: -1.0 if seat == self.loser else 1.0 for seat in range(2)}
        first, second = (sum(map(len, texts)) for texts in self.texts)
        return {0: float(first > second), 1: float(second > first)}
