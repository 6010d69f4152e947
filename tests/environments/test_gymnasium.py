"""Gymnasium's worlds, as an interaction and by name through the loop of environments."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from agent_loop.checks.solutions import play_turns
from agent_loop.environments.gymnasium import (
    ActionReader,
    GymnasiumInteraction,
    GymnasiumSuite,
    InvalidAction,
)
from agent_loop.environments.suite import SolutionTurn
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import load_rows
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import text_reply, user
from tests.interactions.conversations import converse
from tests.rollout.harness import WorkerHarness

FROZEN_LAKE = {
    "name": "lake",
    "env_id": "FrozenLake-v1",
    "env_kwargs": {"render_mode": "ansi", "is_slippery": False},
    "observation": "render",
    "actions": {"left": 0, "down": 1, "right": 2, "up": 3},
    "action_pattern": r"move\s+(\w+)",
}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]
READER = ActionReader(words={}, pattern=None)
PAIR = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))
FIELDS = spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "b": spaces.Discrete(2)})


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        (" 2 ", spaces.Discrete(3), 2),
        ("go", spaces.Text(5), "go"),
        ("[1, 2]", spaces.MultiDiscrete([2, 3]), np.array([1, 2])),
        ("[0.5, -1]", spaces.Box(-1, 1, (2,)), np.array([0.5, -1], np.float32)),
        ("[1, [0.5]]", PAIR, (1, np.array([0.5], np.float32))),
        ('{"a": [0.5], "b": 1}', FIELDS, {"a": np.array([0.5], np.float32), "b": 1}),
        ("[2, 0]", spaces.Sequence(spaces.Discrete(3)), (2, 0)),
    ],
)
def test_an_action_is_converted_to_the_types_of_its_space(text: str, space: Any, action: Any) -> None:
    assert repr(READER.read(text, space)) == repr(action)


@pytest.mark.parametrize(
    ("text", "space", "says"),
    [
        ("5", spaces.Discrete(3), None),
        ("left", spaces.Discrete(3), None),
        ("[3, 3]", spaces.MultiDiscrete([2, 3]), None),
        ("[1.5, 0]", spaces.MultiDiscrete([3, 4]), "is not in MultiDiscrete"),
        ('["a", "b"]', spaces.Box(-1, 1, (2,)), None),
        ("[[1], 2]", spaces.Box(-1, 1, (2,)), None),
        ("[300]", spaces.Box(0, 255, (1,), np.uint8), "out of bounds"),
        ("[2, [0.5]]", PAIR, None),
        ('{"a": [0.5], "c": 1}', FIELDS, None),
    ],
)
def test_a_value_outside_the_space_is_an_invalid_action(text: str, space: Any, says: str | None) -> None:
    with pytest.raises(InvalidAction, match=says):
        READER.read(text, space)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[" * 100_000,
        "1" * 5000,
        "true",
        "null",
        "4",
        "1.5",
        '"1"',
        "[1e999]",
        "[1" + "0" * 40 + "]",
        "{}",
    ],
)
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(1),
        spaces.Box(0, 9, (1,), np.uint8),
        PAIR,
    ],
)
def test_any_other_text_is_an_invalid_action_and_not_a_crash(text: str, space: Any) -> None:
    with pytest.raises(InvalidAction):
        READER.read(text, space)


def test_the_last_match_of_the_pattern_is_the_action() -> None:
    reader = ActionReader(words={"left": 0, "right": 2}, pattern=r"<go>(.*?)</go>")
    assert reader.read("<go>left</go> or rather <go> Right </go>", spaces.Discrete(4)) == 2
    with pytest.raises(InvalidAction, match="'up' is not one of the actions left, right"):
        reader.read("<go>up</go>", spaces.Discrete(4))
    with pytest.raises(InvalidAction, match="nothing in the answer matches"):
        reader.read("left", spaces.Discrete(4))


class Countdown(gymnasium.Env[int, int]):
    """Counts down to 0. All instances are kept in `made`, oldest first."""

    made: list[Countdown]

    def __init__(
        self, start: int = 3, reward: Any = 0.5, fails: bool = False, hangs: threading.Event | None = None
    ):
        self.action_space = spaces.Discrete(4)
        self.observation_space = spaces.Discrete(100)
        self.start, self.reward, self.fails, self.hangs = start, reward, fails, hangs
        self.threads: list[int] = []
        self.is_closed = False
        Countdown.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.threads.append(threading.get_ident())
        self.left = self.start + (options or {}).get("more", 0)
        return self.left + int(self.np_random.integers(1)), {}

    def step(self, action: int):
        self.threads.append(threading.get_ident())
        if self.fails:
            raise ArithmeticError("overflow")
        if self.hangs is not None:
            self.hangs.wait(5)
        self.left -= int(action)
        return self.left, self.reward, self.left <= 0, False, {}

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.is_closed = True


@pytest.fixture(autouse=True)
def countdown() -> None:
    Countdown.made = []
    if "tests/Countdown-v0" not in gymnasium.registry:
        gymnasium.register("tests/Countdown-v0", entry_point=Countdown, disable_env_checker=True)


def counting(**settings: Any) -> GymnasiumInteraction:
    return GymnasiumInteraction({"name": "countdown", "env_id": "tests/Countdown-v0", **settings})


def count_down(
    *rows: Mapping[str, Any], seeds: Sequence[int | None] = (None, None, None)
) -> list[Trajectory]:
    """Play one trajectory for each row of arguments of the interaction, one step at a time."""
    harness = WorkerHarness(lambda _: text_reply("1"), interactions={"countdown": counting()})
    jobs = harness.jobs(
        [{"raw_prompt": user("Go."), "interaction_kwargs": {"name": "countdown", **row}} for row in rows]
    )

    async def main() -> list[Trajectory]:
        seeded = [replace(job, seed=seed) for job, seed in zip(jobs, seeds, strict=False)]
        trajectories = await harness.worker.run(seeded)
        harness.assert_nothing_is_left()
        return trajectories

    return run_virtual(main())


def test_a_model_crosses_the_frozen_lake_with_actions_in_words() -> None:
    lake = GymnasiumInteraction(FROZEN_LAKE)
    trajectory = converse(lake, [f"I move {way.upper()}!" for way in TO_THE_GOAL], seed=1)
    output = trajectory.output
    assert output.messages[0]["content"].endswith("\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    assert output.messages[2]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert output.turn_scores == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    assert [f.extra["terminated"] for f in output.feedback] == [False] * 5 + [True]
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.reward == 1.0


def test_the_time_limit_of_an_environment_truncates_and_does_not_terminate() -> None:
    output = converse(counting(env_kwargs={"start": 9, "max_episode_steps": 2}), ["1", "1"]).output
    last = output.feedback[-1].extra
    assert (last["terminated"], last["truncated"]) == (False, True)
    assert output.stop_reason is StopReason.INTERACTION_FINISHED


def test_each_trajectory_has_its_own_environment_in_its_own_thread_and_closes_it() -> None:
    trajectories = count_down(*({"options": {"more": more}} for more in range(3)))
    assert [len(t.output.turn_scores) for t in trajectories] == [3, 4, 5]
    assert len(Countdown.made) == 3
    assert all(env.is_closed for env in Countdown.made)
    threads = [set(env.threads) for env in Countdown.made]
    assert [len(each) for each in threads] == [1, 1, 1]
    assert threading.get_ident() not in set.union(*threads)


def test_without_a_seed_in_the_row_each_environment_is_seeded_by_its_trajectory() -> None:
    def seeds(*of_trajectories: int | None, **row: Any) -> list[Any]:
        Countdown.made = []
        count_down(*[row] * len(of_trajectories), seeds=of_trajectories)
        return sorted(env.np_random_seed for env in Countdown.made)

    assert seeds(1, 2) == seeds(2, 1)
    assert len({*seeds(1, 2), *seeds(3, 2**62)}) == 4
    assert seeds(1, 2, seed=5) == [5, 5]
    assert seeds(None) != seeds(None)


def test_an_invalid_action_gets_a_reply_and_does_not_step_the_environment() -> None:
    game = counting(invalid_score=-0.25, invalid_reply="Not a valid action: {reason}. Write {json}.")
    trajectory = converse(game, ["7", "one", "3"])
    output = trajectory.output
    assert output.messages[2]["content"] == "Not a valid action: 7 (int) is not in Discrete(4). Write {json}."
    assert "'one' is not a JSON value of Discrete(4)" in output.messages[4]["content"]
    assert output.turn_scores == (-0.25, -0.25, 0.5)
    assert len(Countdown.made[0].threads) == 3
    assert trajectory.reward == 0.0


def test_too_many_invalid_actions_in_a_row_end_the_trajectory() -> None:
    output = converse(counting(max_invalid_in_a_row=1), ["?", "1", "?", "?"]).output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert output.feedback[-1].extra["terminated"] is False


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"fails": True}, "interaction 'countdown' raised ArithmeticError: overflow"),
        ({"reward": "a lot"}, "returned 'a lot' (str) as its reward"),
        ({"begin": 3}, "unexpected keyword argument 'begin'"),
    ],
)
def test_an_error_of_an_environment_fails_its_trajectory_and_closes_the_environment(
    kwargs: dict[str, Any], message: str
) -> None:
    failure = converse(counting(), ["1"], **kwargs).output.failure
    assert failure is not None
    assert message in failure.error
    assert all(env.is_closed for env in Countdown.made)


async def test_a_blocked_step_does_not_block_other_environments() -> None:
    release, game, three = threading.Event(), counting(), [{"role": "assistant", "content": "3"}]
    await game.start_interaction("1", hangs=release)
    await game.start_interaction("2")
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        stuck = group.create_task(game.generate_response("1", three))
        await game.generate_response("2", three)
        assert time.monotonic() - started < 4
        assert not stuck.done()
        release.set()
    await game.finalize_interaction("1")
    await game.finalize_interaction("2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env_ids": "x"}, "unknown key 'env_ids'"),
        ({"action_pattern": "("}, "action_pattern is '\\(', which is not a valid regular expression"),
        ({"observation": "tests.no_such:text"}, "importing tests.no_such raised"),
    ],
)
def test_an_invalid_setting_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        counting(**settings)


SUITE = GymnasiumSuite()
SAFE_LAKE = "FrozenLake-v1?is_slippery=false"
MAPS = f"{SAFE_LAKE}&map_size=4"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in load_rows([f"gymnasium:{name}"], prompt_key="prompt")]


def play(row: Mapping[str, Any], *actions: str) -> Trajectory:
    return asyncio.run(play_turns(SUITE, row, [SolutionTurn(text=action) for action in actions]))


def last_text(trajectory: Trajectory) -> str:
    return str(trajectory.output.messages[-1]["content"])


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        (f"{SAFE_LAKE}&size=2", 1.0),
        (f"{MAPS}&size=12", 1.0),
        ("FrozenLake8x8-v1?is_slippery=false&size=1", 1.0),
        ("CliffWalking-v1?size=1", -13.0),
        ("Taxi-v4?size=6", None),
    ],
)
def test_the_solution_earns_the_worlds_own_reward(name: str, reward: float | None) -> None:
    for row in rows_of(name):
        turns = SUITE.solution(row)
        assert turns is not None
        played = asyncio.run(play_turns(SUITE, row, turns))
        assert played.reward == (20 - (len(turns) - 1) if reward is None else reward)
        assert played.output.stop_reason is StopReason.INTERACTION_FINISHED
        assert not played.output.incidents
        shown = "\n".join(str(message["content"]) for message in played.output.messages)
        assert ("Passenger: in the taxi" in shown) == name.startswith("Taxi")


def test_a_hole_ends_the_walk_without_a_reward() -> None:
    [row] = rows_of(f"{SAFE_LAKE}&size=1")
    played = play(row, "down", "right")
    assert played.reward == 0.0
    assert played.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert last_text(played) == "  (Right)\nSFFF\nF[H]FH\nFFFH\nHFFG"


def test_a_turn_without_an_action_moves_nothing_and_names_the_actions() -> None:
    [row] = rows_of(f"{SAFE_LAKE}&size=1")
    played = play(row, "jump", *TO_THE_GOAL)
    assert played.reward == 1.0
    told = str(played.output.messages[3]["content"])
    assert "'jump' is not one of the actions left, down, right, up" in told


@pytest.mark.parametrize(
    ("name", "actions", "reward"),
    [("CliffWalking-v1", ["up", "up"], -2.0), ("CartPole-v1", ["1", "0", "1"], 3.0)],
    ids=["names", "values"],
)
def test_a_game_that_a_limit_ends_keeps_the_reward_so_far(
    name: str, actions: list[str], reward: float
) -> None:
    [row] = rows_of(f"{name}?size=1")
    assert play(row, *actions).reward == reward


def test_a_row_always_starts_on_its_map_and_other_rows_have_other_maps() -> None:
    rows = rows_of(f"{MAPS}&size=20")
    assert rows == rows_of(f"{MAPS}&size=20")
    assert len({SUITE.identity(row) for row in rows}) > 15
    assert len({last_text(play(rows[3], "down")) for _ in range(3)}) == 1


def test_the_same_actions_lead_to_the_same_steps_on_slippery_ice() -> None:
    [row] = rows_of("FrozenLake-v1?size=1&seed=5")
    walks = [play(row, *["right", "down"] * 4).output.messages for _ in range(3)]
    assert walks[0] == walks[1] == walks[2]
    assert SUITE.solution(row) is None


def test_a_row_whose_start_has_changed_is_not_scored() -> None:
    [row] = rows_of(f"{SAFE_LAKE}&size=1")
    row["raw_prompt"] = [row["raw_prompt"][0], {"role": "user", "content": "[S]FFF"}]
    played = play(row, "down")
    assert played.reward is None
    assert "another observation than the row's" in str(played.output.failure)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("FrozenLake-v1?slippery=false", "unexpected keyword argument 'slippery'"),
        ("FrozenLakes-v1", "FrozenLake"),
        ("Taxi-v4?map_size=4", "only FrozenLake-v1 has random maps"),
        ("FrozenLake-v1?map_size=1", "map_size"),
        ("FrozenLake-v1?size=0", "size"),
    ],
)
def test_a_wrong_name_or_option_is_an_error_that_names_it(name: str, error: str) -> None:
    with pytest.raises((ConfigError, DataError), match=error):
        rows_of(name)


def test_the_listed_tasks_have_named_actions_and_start() -> None:
    assert {"FrozenLake-v1", "Blackjack-v1", "CliffWalking-v1"} <= set(SUITE.tasks())
    for task in SUITE.tasks():
        [row] = rows_of(f"{task}?size=1")
        assert row["task"]["actions"], task


def minigrid_rows(world: str) -> list[dict[str, Any]]:
    pytest.importorskip("minigrid")
    return rows_of(f"MiniGrid-{world}-v0?size=3")


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


@pytest.mark.environments
@pytest.mark.parametrize("world", ["Empty-5x5", "FourRooms", "LavaGapS5", "SimpleCrossingS9N1"])
def test_the_shortest_way_through_a_minigrid_earns_the_reward_of_the_world_itself(world: str) -> None:
    for row in minigrid_rows(world):
        env = gymnasium.make(row["task"]["env_id"], **row["task"]["env_kwargs"])
        env.reset(seed=row["task"]["seed"])
        actions = way_to_goal(env)
        reward = sum(float(env.step(action)[1]) for action in actions)
        env.close()
        played = play(row, *(("left", "right", "forward")[action] for action in actions))
        assert played.reward == pytest.approx(reward)
        assert reward > 0
        assert played.output.stop_reason is StopReason.INTERACTION_FINISHED


@pytest.mark.environments
def test_the_observation_of_a_minigrid_is_the_mission_and_the_grid() -> None:
    [row, *_] = minigrid_rows("Empty-5x5")
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
