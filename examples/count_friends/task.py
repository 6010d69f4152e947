"""Task: count the friends in a riddle of reasoning-gym. The demonstrations answer with a random digit."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agent_loop.environments.reasoning_gym import ReasoningGymSuite
from agent_loop.environments.tasks import parse_task_name, suite_rows
from agent_loop.types import Message

RIDDLES = "reasoning_gym:aiw?task_type_weights=[0,1,0]&split=train&size=512&seed={seed}"


def demonstrations(rng: random.Random) -> Iterator[list[Message]]:
    """Yield training riddles without limit. Every digit from 1 to 9 is equally likely, whatever the riddle."""
    suite = ReasoningGymSuite()
    while True:
        name = parse_task_name(RIDDLES.format(seed=rng.randrange(2**31)), suite=suite)
        for row in suite_rows(suite, name):
            answer = f"<answer>{rng.randint(1, 9)}</answer>"
            yield [*row["raw_prompt"], {"role": "assistant", "content": answer}]
