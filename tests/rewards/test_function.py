"""Reward functions, and sums of several of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.config import Config, RewardConfig, RolloutConfig
from agent_loop.config.validation import parse_section
from agent_loop.errors import ConfigError, RewardError, RewardUnavailable
from agent_loop.rewards.combined import CombinedBatchReward, CombinedReward, Part, load_rewards
from agent_loop.rewards.function import RewardFunction, Score, load_reward
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.components import load_reward_function
from agent_loop.rollout.failures import failure_of
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import AgentLoopOutput, FailureKind, IncidentKind, Trajectory
from agent_loop.types import Row
from tests.helpers import hermes_template, text_reply, user
from tests.rewards.judges import answer, judged_by, output_saying
from tests.rollout.harness import error_of

OUTPUT = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
ROW = {"solution": "4"}


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


@pytest.mark.virtual_time
async def test_a_sync_function_runs_in_a_thread_and_an_async_one_on_the_loop() -> None:
    def in_thread(output: AgentLoopOutput, row: Any) -> bool:
        return threading.current_thread() is threading.main_thread()

    async def on_loop(output: AgentLoopOutput, row: Any) -> bool:
        await asyncio.sleep(1)
        return in_thread(output, row)

    class OnLoop:
        async def __call__(self, output: AgentLoopOutput, row: Any) -> float:
            return 2.0 + await on_loop(output, row)

    for function, reward in ((in_thread, 0), (on_loop, 1), (OnLoop(), 3)):
        assert (await RewardFunction(function, timeout_s=60)(OUTPUT, ROW)).reward == reward


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
def test_a_reference_that_is_no_reward_function_is_refused(file: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_reward(f"{file}:{name}", timeout_s=60)


TASK = """
from agent_loop.errors import RewardUnavailable

def right(output, row):
    return {"reward": float(output.answer == row["solution"]), "said": output.answer}

def length(output, row):
    return len(output.answer)

def rank(outputs, rows):
    return [n / len(outputs) for n in range(len(outputs))]

def broken(output, row):
    return row["missing"]

def gone(output, row):
    raise RewardUnavailable("the grader is down")

async def waits(output, row):
    import asyncio
    await asyncio.Event().wait()

def huge(output, row):
    return 1e15

def hostile(output, row):
    return {"reward": 1.0, "object": object()}

def at_times(outputs, rows):
    return [1.0 if output.answer == "4" else "nothing" for output in outputs]
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


def config_of(task: Path, *, batch: bool = False, **parts: Any) -> RewardConfig:
    given = {name: part if isinstance(part, dict) else {"function": part} for name, part in parts.items()}
    functions = {name: {**part, "function": f"{task}:{part['function']}"} for name, part in given.items()}
    return parse_section(RewardConfig, {"functions": functions, "batch": batch}, where="config")


def single(task: Path, **parts: Any) -> Score:
    reward = load_rewards(config_of(task, **parts))
    assert isinstance(reward, CombinedReward)
    return run_virtual(reward(output_saying("4"), ROW))


def test_the_reward_is_the_weighted_sum_and_each_part_is_recorded(task: Path) -> None:
    score = single(
        task,
        correct={"function": "right", "weight": 2.0},
        brevity={"function": "length", "weight": -0.5},
        watched={"function": "length", "weight": 0},
    )
    assert score == Score(1.5, {"correct": 1.0, "correct.said": "4", "brevity": 1.0, "watched": 1.0})


@pytest.mark.virtual_time
async def test_parts_run_at_the_same_time() -> None:
    started: list[str] = []

    def part(name: str) -> Part:
        async def reward(output: AgentLoopOutput, row: Row) -> float:
            started.append(name)
            await asyncio.sleep(10)
            return 1.0

        return Part(RewardFunction(reward, timeout_s=60))

    await CombinedReward({name: part(name) for name in "abc"})(output_saying("4"), ROW)
    assert asyncio.get_running_loop().time() == pytest.approx(10)
    assert started == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("function", "says", "kind"),
    [
        ("broken", "part 'format': reward function .*:broken raised KeyError: 'missing'", FailureKind.CODE),
        ("gone", "part 'format': the grader is down", FailureKind.REWARD),
        ("waits", "part 'format': .*took longer than 60 s", FailureKind.REWARD),
    ],
)
def test_the_part_that_failed_is_named(task: Path, function: str, says: str, kind: FailureKind) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        single(task, correct="right", format=function)
    assert failure_of(caught.value).kind is kind


async def test_a_judge_can_be_a_part(task: Path, tmp_path: Path) -> None:
    criteria = {"polite": {"question": "Polite?"}}
    async with judged_by(tmp_path, lambda _: answer("yes"), criteria=criteria) as (path, _):
        parts = {"correct": {"function": f"{task}:right"}, "judged": {"function": path, "weight": 0.5}}
        reward = load_rewards(parse_section(RewardConfig, {"functions": parts}, where="config"))
        assert isinstance(reward, CombinedReward)
        score = await reward(output_saying("4"), ROW)
    extra = {"correct": 1.0, "correct.said": "4", "judged": 1.0, "judged.polite": 1.0}
    assert score == Score(1.5, extra)


def grouped(reward: Any, *, retries: int = 0) -> list[Trajectory]:
    """Run one group of four whose answers are 1, 2, 3 and 4."""
    replies = iter(range(1, 5))
    manager = AgentLoopManager(
        RolloutConfig(n=4, max_failed_share=1.0, retries=retries),
        servers=[ScriptedServer(lambda _: text_reply(str(next(replies))))],
        template=hermes_template(),
        reward=reward,
    )
    return run_virtual(manager.run([{"raw_prompt": user("count"), **ROW}]))


def test_parts_for_groups_and_for_trajectories_are_added_and_are_metrics_and_columns(task: Path) -> None:
    order = {"function": "rank", "batch": True, "weight": 2.0}
    trajectories = grouped(load_rewards(config_of(task, batch=True, order=order, correct="right")))
    assert [t.reward for t in trajectories] == [0.0, 0.5, 1.0, 2.5]
    assert [t.reward_extra["order"] for t in trajectories] == [0.0, 0.25, 0.5, 0.75]
    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)
    of_parts = {name: value for name, value in metrics.items() if name.startswith("reward/part/")}
    assert of_parts == {"reward/part/correct/mean": 0.25, "reward/part/order/mean": 0.375}
    batch = assemble(trajectories, pad_token_id=0)
    assert list(batch["correct"]) == [0.0, 0.0, 0.0, 1.0]
    assert list(batch["correct.said"]) == ["1", "2", "3", "4"]


def test_a_part_that_fails_for_some_trajectories_of_a_group_leaves_only_those_unscored(task: Path) -> None:
    config = config_of(task, batch=True, some={"function": "at_times", "batch": True}, correct="right")
    trajectories = grouped(load_rewards(config))

    assert [t.reward for t in trajectories] == [None, None, None, 2.0]
    error = error_of(trajectories[0])
    assert "part 'some': reward function" in error
    assert "at index 0, returned 'nothing'" in error


def test_a_group_is_scored_again_if_infrastructure_failed_for_some_of_its_trajectories() -> None:
    calls = Counter[str]()

    async def at_first(output: AgentLoopOutput, row: Row) -> float:
        calls[output.answer] += 1
        if output.answer in ("2", "3") and calls[output.answer] < int(output.answer):
            raise RewardUnavailable("the grader is busy")
        return float(output.answer)

    parts = {"graded": Part(RewardFunction(at_first, timeout_s=60))}
    trajectories = grouped(CombinedBatchReward(parts), retries=2)

    assert [t.reward for t in trajectories] == [1.0, 2.0, 3.0, 4.0]
    kinds = [incident.kind for t in trajectories for incident in t.output.incidents]
    assert kinds == [IncidentKind.RETRIED] * 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"function": "task.py:right", "functions": {"a": {"function": "task.py:right"}}}, "are both set"),
        ({"functions": {"a": {"function": "task.py:rank", "batch": True}}}, "set reward.batch=true"),
        ({"functions": {"reward": {"function": "task.py:right"}}}, "choose another"),
        ({"functions": {"a.b": {"function": "task.py:right"}}}, "a.b"),
        ({"functions": {"a": {"weight": 1}}}, "function"),
        ({"functions": {"a": {"function": "task.py:right", "weight": float("nan")}}}, "weight"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_section(Config, {"reward": values}, where="config")


def test_the_error_of_a_function_that_cannot_be_loaded_names_its_part(task: Path) -> None:
    config = Config(reward=config_of(task, correct="right", format="no_such"))
    with pytest.raises(ConfigError, match=r"reward\.functions\.format: reward\.function is .*no_such"):
        load_reward_function(config)
