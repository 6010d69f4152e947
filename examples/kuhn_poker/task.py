"""Task: Kuhn poker of TextArena. The demonstrations are games between players that move at random."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agent_loop.environments.tasks import parse_task_name, suite_rows
from agent_loop.environments.textarena import TextArenaGame, TextArenaSuite
from agent_loop.types import Message

GAMES = "textarena:KuhnPoker-v0?players=2&split=train&size=512&seed={seed}"


def demonstrations(rng: random.Random) -> Iterator[list[Message]]:
    """Yield the conversations of both seats of games with random legal moves, without limit."""
    suite = TextArenaSuite()
    while True:
        name = parse_task_name(GAMES.format(seed=rng.randrange(2**31)), suite=suite)
        for row in suite_rows(suite, name):
            game = TextArenaGame()
            seats: list[list[Message]] = [[] for _ in range(game.reset(row))]
            while (seat := game.turn()) is not None:
                seats[seat].append({"role": "user", "content": game.observe(seat)})
                move = rng.choice(game.legal_moves(seat))
                seats[seat].append({"role": "assistant", "content": move})
                game.act(seat, move)
            yield from seats
