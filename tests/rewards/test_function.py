import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.errors import ConfigError, RewardError
from agent_loop.rewards.function import RewardFunction, Score, load_reward
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput

OUTPUT = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
ROW = {"answer": "4"}


def score_of(returned: Any) -> Score:
    return run_virtual(RewardFunction(lambda output, row: returned, timeout_s=60, name="judge")(OUTPUT, ROW))


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (0.5, Score(0.5)),
        (1, Score(1.0)),
        (True, Score(1.0)),
        (np.float32(0.25), Score(0.25)),
        (np.bool_(True), Score(1.0)),
        ({"reward": 1, "format": 0.5}, Score(1.0, {"format": 0.5})),
        ({"score": 2.0, "why": "close"}, Score(2.0, {"why": "close"})),
        ({"reward": 1.0, "score": 7}, Score(1.0, {"score": 7})),
    ],
)
def test_numbers_and_mappings_are_accepted_as_rewards(returned: Any, score: Score) -> None:
    assert score_of(returned) == score


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "reward function judge returned None; return a finite number"),
        ("1.0", r"returned '1.0' \(str\); return"),
        (float("nan"), "returned nan"),
        (float("-inf"), "returned -inf"),
        (10**400, "returned 1000"),
        ([1.0], "returned .1.0. .list."),
        (np.zeros(2), "returned array"),
        ({"reward": None}, "returned reward None"),
        ({"scor": 1.0}, r"a mapping with the keys \['scor'\]; add 'reward'"),
    ],
)
def test_the_error_for_any_other_value_states_the_value(returned: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        score_of(returned)


def test_a_sync_function_runs_in_a_thread_and_an_async_one_on_the_loop() -> None:
    def in_thread(output: AgentLoopOutput, row: Any) -> bool:
        return threading.current_thread() is threading.main_thread()

    async def on_loop(output: AgentLoopOutput, row: Any) -> bool:
        await asyncio.sleep(1)
        return threading.current_thread() is threading.main_thread()

    class OnLoop:
        async def __call__(self, output: AgentLoopOutput, row: Any) -> float:
            await asyncio.sleep(1)
            return 3.0

    assert run_virtual(RewardFunction(in_thread, timeout_s=60)(OUTPUT, ROW)).reward == 0
    assert run_virtual(RewardFunction(on_loop, timeout_s=60)(OUTPUT, ROW)).reward == 1
    assert run_virtual(RewardFunction(OnLoop(), timeout_s=60)(OUTPUT, ROW)).reward == 3


def test_an_exception_is_named_with_the_function_and_kept_as_the_cause() -> None:
    def judge(output: AgentLoopOutput, row: Any) -> float:
        return row["truth"]

    with pytest.raises(RewardError, match="judge raised KeyError: 'truth'") as caught:
        run_virtual(RewardFunction(judge, timeout_s=60)(OUTPUT, ROW))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hung_reward_function_ends_at_its_time_limit() -> None:
    async def judge(output: AgentLoopOutput, row: Any) -> float:
        await asyncio.Event().wait()
        return 0.0

    with pytest.raises(RewardError, match="judge took longer than 60 s; fix it"):
        run_virtual(RewardFunction(judge, timeout_s=60)(OUTPUT, ROW))


FUNCTIONS = """
def exact(output, row, tolerance=0): return 1.0
def other(data_source, solution, ground_truth): return 1.0
def keyword(*, output, row): return 1.0
class Judge: pass
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def test_a_reference_loads_a_function(file: Path) -> None:
    reward = load_reward(f"{file}:exact", timeout_s=60)
    assert run_virtual(reward(OUTPUT, ROW)) == Score(1.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other", r"takes \(data_source, solution, ground_truth\); it is called as \(output, row\)"),
        ("keyword", r"it is called as \(output, row\)"),
        ("Judge", "a class; name a function"),
        ("number", "an object of type int; name a function"),
        ("exactly", "did you mean 'exact'"),
    ],
)
def test_a_reference_that_is_not_a_reward_function_is_refused_before_anything_runs(
    file: Path, name: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_reward(f"{file}:{name}", timeout_s=60)
