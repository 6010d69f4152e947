"""Gymnasium's worlds by name, played through the loop of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agent_loop.checks.solutions import play_turns
from agent_loop.environments.gymnasium import GymnasiumSuite
from agent_loop.environments.suite import SolutionTurn
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import load_rows
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason

SUITE = GymnasiumSuite()
SAFE_LAKE = "gymnasium:FrozenLake-v1?is_slippery=false"
MAPS = f"{SAFE_LAKE}&map_size=4"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in load_rows([name], prompt_key="prompt")]


def play(row: Mapping[str, Any], *actions: str) -> Trajectory:
    return asyncio.run(play_turns(SUITE, row, [SolutionTurn(text=action) for action in actions]))


def solve(row: Mapping[str, Any]) -> Trajectory:
    turns = SUITE.solution(row)
    assert turns is not None
    return asyncio.run(play_turns(SUITE, row, turns))


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        (f"{SAFE_LAKE}&size=2", {1.0}),
        (f"{MAPS}&size=12", {1.0}),
        ("gymnasium:FrozenLake8x8-v1?is_slippery=false&size=1", {1.0}),
        ("gymnasium:CliffWalking-v1?size=1", {-13.0}),
    ],
)
def test_the_solution_earns_the_worlds_own_reward(name: str, rewards: set[float]) -> None:
    for row in rows_of(name):
        played = solve(row)
        assert played.reward in rewards
        assert played.output.stop_reason is StopReason.INTERACTION_FINISHED
        assert not played.output.incidents


def test_the_taxi_delivers_its_passenger_and_pays_for_each_step() -> None:
    for row in rows_of("gymnasium:Taxi-v4?size=6"):
        turns = SUITE.solution(row)
        assert turns is not None
        played = solve(row)
        assert played.reward == 20 - (len(turns) - 1)
        assert "Passenger: in the taxi" in "\n".join(str(m["content"]) for m in played.output.messages)


def test_a_hole_ends_the_walk_without_a_reward() -> None:
    [row] = rows_of(f"{SAFE_LAKE}&size=1")
    played = play(row, "down", "right")
    assert played.reward == 0.0
    assert played.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert played.output.messages[-1]["content"] == "  (Right)\nSFFF\nF[H]FH\nFFFH\nHFFG"


def test_a_turn_without_an_action_moves_nothing_and_names_the_actions() -> None:
    [row] = rows_of(f"{SAFE_LAKE}&size=1")
    played = play(row, "jump", "down", "down", "right", "right", "down", "right")
    assert played.reward == 1.0
    assert "'jump' is not one of the actions left, down, right, up" in str(
        played.output.messages[3]["content"]
    )


def test_a_walk_that_a_limit_ends_keeps_the_reward_so_far() -> None:
    [row] = rows_of("gymnasium:CliffWalking-v1?size=1")
    assert play(row, "up", "up").reward == -2.0


def test_a_row_always_starts_on_its_map_and_other_rows_have_other_maps() -> None:
    rows = rows_of(f"{MAPS}&size=20")
    assert rows == rows_of(f"{MAPS}&size=20")
    assert len({SUITE.identity(row) for row in rows}) > 15
    assert len({str(play(rows[3], "down").output.messages[-1]["content"]) for _ in range(3)}) == 1


def test_the_same_actions_lead_to_the_same_steps_on_slippery_ice() -> None:
    [row] = rows_of("gymnasium:FrozenLake-v1?size=1&seed=5")
    walks = [
        [message["content"] for message in play(row, *["right", "down"] * 4).output.messages]
        for _ in range(3)
    ]
    assert walks[0] == walks[1] == walks[2]
    assert SUITE.solution(row) is None


def test_splits_share_no_map() -> None:
    train, val = (rows_of(f"{MAPS}&size=100&split={split}") for split in ("train", "val"))
    assert {SUITE.identity(row) for row in train}.isdisjoint(SUITE.identity(row) for row in val)


def test_a_row_whose_start_has_changed_is_not_scored() -> None:
    [row] = rows_of(f"{SAFE_LAKE}&size=1")
    row["raw_prompt"] = [row["raw_prompt"][0], {"role": "user", "content": "[S]FFF"}]
    played = play(row, "down")
    assert played.reward is None
    assert "another observation than the row's" in str(played.output.failure)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("gymnasium:FrozenLake-v1?slippery=false", "unexpected keyword argument 'slippery'"),
        ("gymnasium:FrozenLakes-v1", "FrozenLake"),
        ("gymnasium:Taxi-v4?map_size=4", "only FrozenLake-v1 has random maps"),
        ("gymnasium:FrozenLake-v1?map_size=1", "map_size"),
        ("gymnasium:FrozenLake-v1?size=0", "size"),
    ],
)
def test_a_wrong_name_or_option_is_an_error_that_names_it(name: str, error: str) -> None:
    with pytest.raises((ConfigError, DataError), match=error):
        rows_of(name)


def test_a_world_without_names_for_its_actions_reads_values() -> None:
    [row] = rows_of("gymnasium:CartPole-v1?size=1")
    assert play(row, "1", "0", "1").reward == 3.0
    assert SUITE.solution(row) is None


def test_the_listed_tasks_have_named_actions_and_start() -> None:
    assert {"FrozenLake-v1", "Blackjack-v1", "CliffWalking-v1"} <= set(SUITE.tasks())
    for task in SUITE.tasks():
        [row] = rows_of(f"gymnasium:{task}?size=1")
        assert row["task"]["actions"], task
