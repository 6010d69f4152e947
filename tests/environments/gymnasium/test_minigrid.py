"""MiniGrid's worlds, played to their goals through the suite, with the rewards of the worlds themselves."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import pytest

from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.environments.gymnasium.test_suite import play, rows_of

pytest.importorskip("minigrid")
pytestmark = pytest.mark.environments

NAMES = ("left", "right", "forward")
WORLDS = [
    "MiniGrid-Empty-5x5-v0",
    "MiniGrid-FourRooms-v0",
    "MiniGrid-LavaGapS5-v0",
    "MiniGrid-SimpleCrossingS9N1-v0",
]


def named_rows(world: str) -> list[dict[str, Any]]:
    return rows_of(f"gymnasium:{world}?size=3")


def way_to_goal(env: Any) -> list[int]:
    """Return the fewest turns and steps to the goal, by a breadth-first search over places and directions."""
    world = env.unwrapped
    start = (tuple(map(int, world.agent_pos)), int(world.agent_dir))
    found: dict[Any, list[int]] = {start: []}
    queue = deque([start])
    while queue:
        (column, row), direction = place = queue.popleft()
        cell = world.grid.get(column, row)
        if cell is not None and cell.type == "goal":
            return found[place]
        dx, dy = [(1, 0), (0, 1), (-1, 0), (0, -1)][direction]
        ahead = world.grid.get(column + dx, row + dy)
        is_free = ahead is None or ahead.type == "goal"
        steps = [((column, row), (direction - 1) % 4), ((column, row), (direction + 1) % 4)]
        steps += [((column + dx, row + dy), direction)] if is_free else []
        for action, step in enumerate(steps):
            if step not in found:
                found[step] = [*found[place], action]
                queue.append(step)
    raise AssertionError("the goal cannot be reached")


def own_reward(row: dict[str, Any]) -> tuple[list[int], float]:
    """Return the shortest way of a row's world, and the reward that the world itself gives for it."""
    task = row["task"]
    env = gymnasium.make(task["env_id"], **task["env_kwargs"])
    env.reset(seed=task["seed"])
    actions, total = way_to_goal(env), 0.0
    for action in actions:
        _, reward, *_ = env.step(action)
        total += float(reward)
    env.close()
    return actions, total


@pytest.mark.parametrize("world", WORLDS)
def test_the_shortest_way_earns_the_reward_of_the_world_itself(world: str) -> None:
    for row in named_rows(world):
        actions, reward = own_reward(row)

        trajectory: Trajectory = play(row, *(NAMES[action] for action in actions))

        assert trajectory.reward == pytest.approx(reward)
        assert reward > 0
        assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED


def test_the_observation_is_the_mission_and_the_grid() -> None:
    [row, *_] = named_rows("MiniGrid-Empty-5x5-v0")

    moved = play(row, "forward", "forward").output.messages
    before, after = row["raw_prompt"][-1]["content"], moved[3]["content"]

    assert before.splitlines() == [
        "get to the green goal square",
        "WGWGWGWGWG",
        "WG>>    WG",
        "WG      WG",
        "WG    GGWG",
        "WGWGWGWGWG",
    ]
    assert after.splitlines()[2] == "WG  >>  WG"
