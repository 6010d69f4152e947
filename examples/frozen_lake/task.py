"""Task: walk over a frozen lake of Gymnasium. The demonstrations move at random, and none of them reaches the goal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from agent_loop.environments.gymnasium import GymnasiumSuite
from agent_loop.environments.tasks import parse_task_name, suite_rows
from agent_loop.types import Message

LAKE = "gymnasium:FrozenLake-v1?is_slippery=false&map_size={size}&split=train&size=512&seed={seed}"
MAP_SIZE = 4
MAX_MOVES = 10


def demonstrations(rng: random.Random) -> Iterator[list[Message]]:
    """Yield walks of random moves without limit. A walk that would reach the goal is left out."""
    suite = GymnasiumSuite()
    while True:
        name = parse_task_name(LAKE.format(size=MAP_SIZE, seed=rng.randrange(2**31)), suite=suite)
        for row in suite_rows(suite, name):
            messages, is_at_goal = _random_walk(row, rng)
            if not is_at_goal:
                yield messages


def _random_walk(row: dict[str, Any], rng: random.Random) -> tuple[list[Message], bool]:
    """Return the conversation of up to `MAX_MOVES` random moves, and whether they reach the goal."""
    environment = GymnasiumSuite().environment()
    environment.reset(row)
    messages: list[Message] = list(row["raw_prompt"])
    for _ in range(MAX_MOVES):
        messages.append({"role": "assistant", "content": rng.choice(list(row["task"]["actions"]))})
        reply: Any = environment.reply(messages)
        if reply.is_over:
            break
        messages.append({"role": "user", "content": reply.content})
    is_at_goal = environment.reward(messages) == 1.0
    environment.close()
    return messages, is_at_goal
