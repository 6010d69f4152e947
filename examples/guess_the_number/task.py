"""Task: find a number with four guesses. The reply to a wrong guess is the remaining interval."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.interactions.base import BaseInteraction
from agent_loop.runtime.instances import OnReplay
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message

SYSTEM = "Find the number."
HINT = "It is between {} and {}."
ANSWER = "Is it {}?"
WIDTH = 14
"""`high - low` at first: 15 numbers, which four guesses at the middle always find."""
LOWS = range(20, 85)


@dataclass(slots=True)
class Game:
    """State of one trajectory."""

    low: int
    high: int
    secret: int

    def narrow(self, guess: int) -> None:
        """Remove a wrong guess and all numbers on the wrong side of it from the interval."""
        if guess < self.secret:
            self.low = guess + 1
        else:
            self.high = guess - 1


class GuessTheNumber(BaseInteraction):
    """Replies to a wrong guess with the remaining interval.

    A guess outside the interval, and an answer that is not a guess, ends the game.
    """

    on_replay = OnReplay.RERUN

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._games: dict[str, Game] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._games[instance_id] = Game(kwargs["low"], kwargs["high"], kwargs["secret"])

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        game = self._games[instance_id]
        found = re.fullmatch(re.escape(ANSWER).replace(r"\{\}", r"(\d{1,4})"), str(messages[-1]["content"]))
        guess = None if found is None else int(found[1])
        if guess is None or not game.low <= guess <= game.high:
            return True, "You lose.", 0.0, {}
        if guess == game.secret:
            return True, "Yes!", 1.0, {}
        game.narrow(guess)
        return False, HINT.format(game.low, game.high), 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._games.pop(instance_id, None)


def train_rows(seed: int = 0, count: int = 2048) -> list[dict[str, Any]]:
    """Return rows about intervals that are not held out."""
    return _rows(random.Random(seed), count=count, held_out=False)


def val_rows(seed: int = 1, count: int = 256) -> list[dict[str, Any]]:
    """Return rows about held-out intervals, which no training row begins with."""
    return _rows(random.Random(seed), count=count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the number was found, else 0."""
    return float(1.0 in output.turn_scores)


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward, always guessing the middle."""
    game = Game(row["low"], row["high"], row["secret"])
    turns: list[Message] = []
    while True:
        guess = (game.low + game.high) // 2
        turns.append({"role": "assistant", "content": ANSWER.format(guess)})
        if guess == game.secret:
            return turns
        game.narrow(guess)
        turns.append({"role": "user", "content": HINT.format(game.low, game.high)})


def _rows(rng: random.Random, *, count: int, held_out: bool) -> list[dict[str, Any]]:
    lows = [low for low in LOWS if _is_held_out(low) == held_out]
    rng.shuffle(lows)
    return [_row(rng, low=lows[number % len(lows)]) for number in range(count)]


def _is_held_out(low: int) -> bool:
    return low % 7 == 0


def _row(rng: random.Random, *, low: int) -> dict[str, Any]:
    high = low + WIDTH
    middle = (low + high) // 2
    secret = rng.choice([number for number in range(low, high + 1) if number != middle])
    numbers = {"low": low, "high": high, "secret": secret}
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": HINT.format(low, high)},
        ],
        "agent_name": "tool_agent",
        "interaction_kwargs": {"name": "guess_the_number", **numbers},
        **numbers,
    }
