"""Sums of several reward functions."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import Config, RewardConfig, RolloutConfig
from agent_loop.config.validation import parse_section
from agent_loop.errors import ConfigError, RewardError, RewardUnavailable
from agent_loop.rewards.combined import CombinedBatchReward, CombinedReward, Part, load_rewards
from agent_loop.rewards.function import RewardFunction, Score
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
from tests.rewards.judges import answer, judging, output_saying, settings_of, write_file

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
ROW = {"solution": "4"}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


def config_of(task: Path, *, batch: bool = False, **parts: Any) -> RewardConfig:
    functions = {
        name: {"function": f"{task}:{part}"}
        if isinstance(part, str)
        else {**part, "function": f"{task}:{part['function']}"}
        for name, part in parts.items()
    }
    return parse_section(RewardConfig, {"functions": functions, "batch": batch}, where="config")


def single(task: Path, **parts: Any) -> Score:
    return run_virtual(load_single(task, **parts)(output_saying("4"), ROW))


def load_single(task: Path, **parts: Any) -> CombinedReward:
    reward = load_rewards(config_of(task, **parts))
    assert isinstance(reward, CombinedReward)
    return reward


def test_the_reward_is_the_weighted_sum_and_each_part_is_recorded(task: Path) -> None:
    score = single(
        task,
        correct={"function": "right", "weight": 2.0},
        brevity={"function": "length", "weight": -0.5},
        watched={"function": "length", "weight": 0},
    )
    assert score == Score(1.5, {"correct": 1.0, "correct.said": "4", "brevity": 1.0, "watched": 1.0})


def test_parts_run_at_the_same_time() -> None:
    started = Counter[str]()

    def part(name: str) -> RewardFunction:
        async def reward(output: AgentLoopOutput, row: Row) -> float:
            started[name] += 1
            await asyncio.sleep(10)
            return 1.0

        return RewardFunction(reward, timeout_s=60)

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        began = clock()
        await CombinedReward({name: Part(part(name)) for name in "abc"})(output_saying("4"), ROW)
        return clock() - began

    assert run_virtual(main()) == pytest.approx(10)
    assert started == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("function", "says", "kind"),
    [
        ("broken", "part 'format': reward function .*:broken raised KeyError: 'missing'", FailureKind.CODE),
        ("gone", "part 'format': the grader is down", FailureKind.REWARD),
        ("waits", "part 'format': .*took longer than 60 s", FailureKind.REWARD),
    ],
)
def test_a_failed_part_is_named_and_leaves_no_reward(
    task: Path, function: str, says: str, kind: FailureKind
) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        single(task, correct="right", format=function)
    assert failure_of(caught.value).kind is kind


def test_a_judge_can_be_a_part(task: Path, tmp_path: Path) -> None:
    async def main() -> Score:
        async with judging(lambda _: answer("yes")) as judge:
            path = write_file(
                tmp_path, {**settings_of(judge), "criteria": {"polite": {"question": "Polite?"}}}
            )
            functions = {
                "correct": {"function": f"{task}:right"},
                "judged": {"function": path, "weight": 0.5},
            }
            reward = load_rewards(parse_section(RewardConfig, {"functions": functions}, where="config"))
            assert isinstance(reward, CombinedReward)
            return await reward(output_saying("4"), ROW)

    assert asyncio.run(main()) == Score(
        1.5, {"correct": 1.0, "correct.said": "4", "judged": 1.0, "judged.polite": 1.0}
    )


# -- groups ----------------------------------------------------------------------------------------------------------


def grouped(reward: Any, *, retries: int = 0, n: int = 4) -> list[Trajectory]:
    """Run one group whose answers are 1, 2, 3 and so on."""
    replies = iter(range(1, 100))
    manager = AgentLoopManager(
        RolloutConfig(n=n, max_failed_share=1.0, retries=retries),
        servers=[ScriptedServer(lambda _: text_reply(str(next(replies))))],
        template=hermes_template(),
        reward=reward,
    )
    return run_virtual(manager.run([{"raw_prompt": user("count"), **ROW}]))


def test_parts_for_groups_and_for_trajectories_are_added(task: Path) -> None:
    config = config_of(
        task, batch=True, order={"function": "rank", "batch": True, "weight": 2.0}, correct="right"
    )
    trajectories = grouped(load_rewards(config))

    assert [t.reward for t in trajectories] == [0.0, 0.5, 1.0, 2.5]
    assert [t.reward_extra["order"] for t in trajectories] == [0.0, 0.25, 0.5, 0.75]
    assert [t.reward_extra["correct.said"] for t in trajectories] == ["1", "2", "3", "4"]


def test_a_part_that_fails_for_some_trajectories_of_a_group_leaves_only_those_unscored(task: Path) -> None:
    config = config_of(task, batch=True, some={"function": "at_times", "batch": True}, correct="right")
    trajectories = grouped(load_rewards(config))

    assert [t.reward for t in trajectories] == [None, None, None, 2.0]
    failure = trajectories[0].output.failure
    assert failure is not None
    assert "part 'some': reward function" in failure.error
    assert "at index 0, returned 'nothing'" in failure.error


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


# -- settings --------------------------------------------------------------------------------------------------------


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


def test_each_part_is_a_metric_and_a_column_of_the_batch(task: Path) -> None:
    config = config_of(task, batch=True, order={"function": "rank", "batch": True}, correct="right")
    trajectories = grouped(load_rewards(config))

    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)
    assert {name: value for name, value in metrics.items() if name.startswith("reward/part/")} == {
        "reward/part/correct/mean": 0.25,
        "reward/part/order/mean": 0.375,
    }
    batch = assemble(trajectories, pad_token_id=0)
    assert list(batch["correct"]) == [0.0, 0.0, 0.0, 1.0]
    assert list(batch["correct.said"]) == ["1", "2", "3", "4"]
