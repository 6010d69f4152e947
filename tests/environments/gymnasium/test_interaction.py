from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from agent_loop.environments.gymnasium import GymnasiumInteraction
from agent_loop.errors import ConfigError
from agent_loop.testing import run_virtual
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


class Countdown(gymnasium.Env[int, int]):
    """Counts down to 0. All instances are kept in `made`, oldest first."""

    made: list[Countdown]

    def __init__(
        self, start: int = 3, reward: Any = 0.5, fails: str = "", hangs: threading.Event | None = None
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
        if self.fails == "step":
            raise ArithmeticError("overflow")
        if self.hangs is not None:
            self.hangs.wait(5)
        self.left -= int(action)
        return self.left, self.reward, self.left <= 0, False, {}

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.is_closed = True
        if self.fails == "close":
            raise OSError("gone")


@pytest.fixture(autouse=True)
def countdown() -> None:
    Countdown.made = []
    if "tests/Countdown-v0" not in gymnasium.registry:
        gymnasium.register("tests/Countdown-v0", entry_point=Countdown, disable_env_checker=True)


def counting(**settings: Any) -> GymnasiumInteraction:
    return GymnasiumInteraction({"name": "countdown", "env_id": "tests/Countdown-v0", **settings})


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
    game = counting(env_kwargs={"start": 9, "max_episode_steps": 2})
    output = converse(game, ["1", "1"]).output
    last = output.feedback[-1].extra
    assert (last["terminated"], last["truncated"]) == (False, True)
    assert output.stop_reason is StopReason.INTERACTION_FINISHED


def test_each_trajectory_has_its_own_environment_in_its_own_thread_and_closes_it() -> None:
    game = counting()
    harness = WorkerHarness(lambda _: text_reply("1"), interactions={"countdown": game})
    rows = [
        {"raw_prompt": [], "interaction_kwargs": {"name": "countdown", "options": {"more": n}}}
        for n in range(3)
    ]
    trajectories = harness.run([{**row, "raw_prompt": [{"role": "user", "content": "Go."}]} for row in rows])
    assert [len(t.output.turn_scores) for t in trajectories] == [3, 4, 5]
    assert len(Countdown.made) == 3
    assert all(env.is_closed for env in Countdown.made)
    threads = [set(env.threads) for env in Countdown.made]
    assert [len(each) for each in threads] == [1, 1, 1]
    assert threading.get_ident() not in set.union(*threads)


def test_without_a_seed_in_the_row_each_environment_is_seeded_by_its_trajectory() -> None:
    def seeds(*of_trajectories: int | None, **interaction_kwargs: Any) -> list[Any]:
        Countdown.made = []
        harness = WorkerHarness(lambda _: text_reply("1"), interactions={"countdown": counting()})
        rows = [
            {"raw_prompt": user("Go."), "interaction_kwargs": {"name": "countdown", **interaction_kwargs}}
        ]
        jobs = harness.jobs(rows * len(of_trajectories))
        jobs = [replace(job, seed=seed) for job, seed in zip(jobs, of_trajectories, strict=True)]
        run_virtual(harness.worker.run(jobs))
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
        ({"fails": "step"}, "interaction 'countdown' raised ArithmeticError: overflow"),
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


def test_a_blocked_step_does_not_block_other_environments() -> None:
    release = threading.Event()

    async def main() -> float:
        game = counting()
        await game.start_interaction("1", hangs=release)
        await game.start_interaction("2")
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            stuck = group.create_task(game.generate_response("1", [{"role": "assistant", "content": "3"}]))
            await game.generate_response("2", [{"role": "assistant", "content": "3"}])
            passed_s = time.monotonic() - started
            assert not stuck.done()
            release.set()
        await game.finalize_interaction("1")
        await game.finalize_interaction("2")
        return passed_s

    assert asyncio.run(main()) < 4


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
