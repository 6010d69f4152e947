"""Search for the best way through a Gymnasium environment that tells what each action leads to."""

from __future__ import annotations

from collections import deque
from typing import Any


def best_actions(world: Any) -> list[int] | None:
    """Return the actions from the current state to the end with the largest return, on a shortest path to that end.

    Args:
        world: An unwrapped environment. Its `P` maps a state and an action to outcomes
            `(probability, next state, reward, is the end)`, as in the toy_text worlds.

    Returns:
        None if there is no `P`, if an action has several outcomes, or if no path has an end.
    """
    table: Any = getattr(world, "P", None)
    if table is None:
        return None
    paths: dict[int, tuple[float, list[int]]] = {int(world.s): (0.0, [])}
    queue, ends = deque(paths), list[tuple[float, list[int]]]()
    while queue:
        state = queue.popleft()
        total, path = paths[state]
        for action, outcomes in table[state].items():
            if len({(int(target), reward) for _, target, reward, _ in outcomes}) > 1:
                return None
            _, target, reward, is_end = outcomes[0]
            reached = total + float(reward), [*path, int(action)]
            if is_end:
                ends.append(reached)
            elif int(target) not in paths:
                paths[int(target)] = reached
                queue.append(int(target))
    return max(ends, key=lambda end: end[0])[1] if ends else None
