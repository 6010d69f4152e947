"""Reward functions that are called once for all trajectories of a row."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, Config, RolloutConfig, load_config
from agent_loop.errors import ConfigError, RolloutError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import (
    BatchRewardFunction,
    Score,
    ScoreResult,
    load_batch_reward,
)
from agent_loop.rollout.components import load_reward_function
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.types import Row, StopReason
from tests.helpers import hermes_template, text_reply, user

N = 4
BatchReward = Callable[[list[AgentLoopOutput], list[Row]], Any]


class CountingScript:
    """Returns a new number for every request, after a different time."""

    def __init__(self) -> None:
        self.num_requests = 0

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        self.num_requests += 1
        return text_reply(str(self.num_requests), latency_s=1.0 + self.num_requests * 7 % 5)


class Judge:
    """Rewards each output with the number in its answer, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], list[int]]] = []

    async def __call__(self, outputs: list[AgentLoopOutput], rows: list[Row]) -> list[float]:
        self.calls.append(([output.answer for output in outputs], [row["number"] for row in rows]))
        return [float(output.answer) for output in outputs]


@register("fails_at_times")
class FailsAtTimes(AgentLoopBase):
    """Fails if its answer is a number in `failing`, or always with `all_fail`. `own` is the loop's own reward."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.episode(row["raw_prompt"]) as episode:
            turn = await episode.generate(sampling_params)
            if row.get("all_fail") or turn.parsed.content.strip() in row["failing"]:
                raise ValueError("a bad day")
            return episode.output(reward_score=row.get("own"))


@register("says_two_things")
class SaysTwoThings(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"]) as first, first.branch() as second:
            await first.generate(sampling_params)
            await second.generate(sampling_params)
            return [first.output(), second.output()]


def make_manager(
    reward: BatchReward,
    *,
    num_workers: int = 1,
    timeout_s: float = 60.0,
    agent: str = "tool_agent",
    **settings: Any,
) -> AgentLoopManager:
    return AgentLoopManager(
        RolloutConfig(
            **{"n": N, "max_failed_share": 1.0, **settings},
            agent=AgentConfig(num_workers=num_workers, default_agent_loop=agent),
        ),
        servers=[ScriptedServer(CountingScript())],
        template=hermes_template(),
        reward=BatchRewardFunction(reward, timeout_s=timeout_s, name="judge"),
    )


def rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"raw_prompt": user(f"question {n}"), "number": n, **columns} for n in range(count)]


def rewards_of(trajectories: Sequence[Trajectory]) -> list[list[float | None]]:
    groups: dict[int, list[float | None]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory.reward)
    return list(groups.values())


def errors_of(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.output.failure.error for t in trajectories if t.output.failure is not None]


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3])
def test_each_group_is_scored_by_one_call_however_its_rollouts_are_split_over_workers(
    num_workers: int,
) -> None:
    judge = Judge()

    trajectories = run_virtual(make_manager(judge, num_workers=num_workers).run(rows(3)))

    assert sorted(numbers for _, numbers in judge.calls) == [[n] * N for n in range(3)]
    answers = [t.output.answer for t in trajectories]
    by_row = {numbers[0]: said for said, numbers in judge.calls}
    assert [by_row[n] for n in range(3)] == [answers[N * n : N * n + N] for n in range(3)]
    assert [t.reward for t in trajectories] == [float(answer) for answer in answers]
    assert [(t.group, t.rollout) for t in trajectories] == [(g, n) for g in range(3) for n in range(N)]


def test_an_evaluation_scores_its_samples_of_a_row_together() -> None:
    judge = Judge()
    manager = make_manager(judge, val={"n": 3})

    trajectories = run_virtual(manager.run(rows(2), validate=True))

    assert sorted(numbers for _, numbers in judge.calls) == [[0] * 3, [1] * 3]
    assert len(trajectories) == 6


def test_concurrent_runs_do_not_mix_their_groups() -> None:
    judge = Judge()
    manager = make_manager(judge)

    async def scenario() -> list[list[Trajectory]]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(manager.run(rows(2), label=f"step={n}")) for n in range(3)]
        return [task.result() for task in tasks]

    steps = run_virtual(scenario())
    assert sorted(numbers for _, numbers in judge.calls) == [[0] * N] * 3 + [[1] * N] * 3
    assert all(t.reward == float(t.output.answer) for step in steps for t in step)


def test_a_stream_and_a_callback_get_whole_groups() -> None:
    manager = make_manager(Judge(), num_workers=2)
    told: list[int] = []

    async def scenario() -> list[Trajectory]:
        async with aclosing(manager.stream(rows(3))) as stream:
            streamed = [trajectory async for trajectory in stream]
        await manager.run(rows(3), on_trajectory=lambda t: told.append(t.group))
        return streamed

    streamed = run_virtual(scenario())
    assert all(t.reward is not None for t in streamed)
    for groups in ([t.group for t in streamed], told):
        assert [groups[place] for place in range(0, 3 * N, N) for _ in range(N)] == groups


# -- which trajectories are scored -----------------------------------------------------------------------------------


def test_branches_are_separate_outputs() -> None:
    judge = Judge()

    trajectories = run_virtual(make_manager(judge, agent="says_two_things", n=2, num_workers=2).run(rows(2)))

    assert sorted(numbers for _, numbers in judge.calls) == [[0] * 4, [1] * 4]
    places = [(t.group, t.rollout, t.branch) for t in trajectories]
    assert places == [(g, n, b) for g in range(2) for n in range(2) for b in range(2)]
    assert all(t.reward == float(t.output.answer) for t in trajectories)


def test_failed_trajectories_do_not_reach_the_function() -> None:
    judge = Judge()

    work = rows(2, failing=["1"])
    trajectories = run_virtual(make_manager(judge, agent="fails_at_times").run(work))

    assert sorted(len(said) for said, _ in judge.calls) == [N - 1, N]
    failed = [t for t in trajectories if t.output.stop_reason is StopReason.FAILED]
    assert errors_of(failed) == ["ValueError: a bad day"]
    assert [t.reward for t in failed] == [None]


def test_a_cancelled_trajectory_does_not_keep_its_group_from_being_scored() -> None:
    judge = Judge()
    manager = make_manager(judge)

    async def scenario() -> list[Trajectory]:
        asyncio.get_running_loop().call_later(0.5, manager.cancel, "group=0/rollout=2")
        return await manager.run(rows(1))

    trajectories = run_virtual(scenario())
    assert trajectories[2].output.stop_reason is StopReason.CANCELLED
    assert [t.reward is None for t in trajectories] == [False, False, True, False]
    assert [len(said) for said, _ in judge.calls] == [N - 1]


def test_a_group_with_a_resumable_trajectory_is_scored_after_it_has_ended() -> None:
    judge = Judge()
    manager = make_manager(judge, agent="partial_tool_agent")
    work = rows(2)

    async def scenario() -> tuple[list[Trajectory], list[Trajectory]]:
        asyncio.get_running_loop().call_later(2.5, manager.cancel_all)
        first = await manager.run(work)
        assert not judge.calls
        told: list[Trajectory] = []
        second = await manager.run(work, earlier=first, on_trajectory=told.append)
        assert sorted(map(id, told)) == sorted(map(id, second))
        return first, second

    first, second = run_virtual(scenario())
    assert {t.output.stop_reason for t in first} == {StopReason.ANSWERED, StopReason.CANCELLED}
    assert {t.reward for t in first} == {None}
    assert sorted(numbers for _, numbers in judge.calls) == [[0] * N, [1] * N]
    assert all(t.reward == float(t.output.answer) for t in second)


# -- errors ----------------------------------------------------------------------------------------------------------


def of_row_1(bad: Callable[[int], Any]) -> BatchReward:
    async def reward(outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        if rows[0]["number"] != 1:
            return [1.0] * len(outputs)
        result = bad(len(outputs))
        return await result if asyncio.iscoroutine(result) else result

    return reward


def raises(count: int) -> Any:
    raise KeyError("truth")


async def hangs(count: int) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda count: [0.5] * (count - 1), "judge returned 3 values for 4 outputs; return a list"),
        (lambda count: [0.5] * (count + 1), "judge returned 5 values for 4 outputs; return a list"),
        (
            lambda count: 0.5,
            r"judge returned 0.5 \(float\) for 4 outputs; return a list with one reward for each",
        ),
        (lambda count: None, "judge returned None for 4 outputs"),
        (lambda count: "four", r"judge returned 'four' \(str\) for 4 outputs"),
        (lambda count: {"reward": 1.0}, "judge returned .*; return a list"),
        (raises, "judge raised KeyError: 'truth'; fix it"),
        (hangs, r"judge took longer than 60 s; fix it, or raise reward\.timeout_s"),
    ],
)
def test_a_failing_call_fails_the_trajectories_of_its_group_and_no_others(bad: Any, says: str) -> None:
    trajectories = run_virtual(make_manager(of_row_1(bad), num_workers=2).run(rows(3)))

    assert rewards_of(trajectories) == [[1.0] * N, [None] * N, [1.0] * N]
    errors = errors_of(trajectories)
    assert len(errors) == N
    assert all(re.match(f"RewardError: reward function {says}", error) for error in errors)
    assert all(t.output.messages for t in trajectories)
    assert {t.output.stop_reason for t in trajectories[N : 2 * N]} == {StopReason.FAILED}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), r"returned nan \(float\)"),
        (None, "returned None"),
        ("1.0", r"returned '1.0' \(str\)"),
        ({"scor": 1.0}, "returned a mapping with the keys"),
    ],
)
def test_an_invalid_value_fails_its_own_trajectory_alone(value: Any, says: str) -> None:
    reward = of_row_1(lambda count: [0.5, 0.5, value, 0.5])

    trajectories = run_virtual(make_manager(reward).run(rows(2)))

    assert rewards_of(trajectories) == [[1.0] * N, [0.5, 0.5, None, 0.5]]
    [error] = errors_of(trajectories)
    assert re.match(f"RewardError: reward function judge, at index 2, {says}", error)


def test_too_many_failed_rewards_end_the_run() -> None:
    manager = make_manager(of_row_1(raises), max_failed_share=0.25)
    with pytest.raises(RolloutError, match=r"4 of 12 trajectories failed.* 'truth'"):
        run_virtual(manager.run(rows(3)))


def test_a_value_that_cannot_be_stored_is_an_incident_of_its_trajectory() -> None:
    def reward(outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        return [0.0, {"reward": 1.0, "lock": threading.Lock()}, 0.0, 0.0]

    trajectories = run_virtual(make_manager(reward).run(rows(1)))

    kinds = [[incident.kind for incident in t.output.incidents] for t in trajectories]
    assert kinds == [[], [IncidentKind.UNSTORABLE_VALUE], [], []]


def test_a_cancelled_run_ends_calls_that_are_in_flight() -> None:
    ended: list[str] = []

    async def reward(outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("reward")

    async def scenario() -> None:
        task = asyncio.create_task(make_manager(reward).run(rows(1)))
        asyncio.get_running_loop().call_later(20, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(scenario())
    assert ended == ["reward"]


# -- the function by itself --------------------------------------------------------------------------------------------

OUTPUT = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])


FUNCTIONS = """
def batch(outputs, rows, weight=1): return [1.0 for _ in outputs]
def batch_of_others(answers, questions): return [1.0 for _ in answers]
def single(output, row): return 1.0
def single_ignoring(_, row): return 1.0
def of_verl(data_sources, solution_strs, ground_truths, extra_infos): return [1.0 for _ in solution_strs]
def of_three(answers, questions, more): return [1.0 for _ in answers]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize("name", ["batch", "batch_of_others", "of_verl"])
def test_a_reference_loads_a_batch_function(file: Path, name: str) -> None:
    config = Config.model_validate({"reward": {"function": f"{file}:{name}", "batch": True}})
    function = load_reward_function(config)
    assert isinstance(function, BatchRewardFunction)
    assert run_virtual(function([OUTPUT], [{}])) == [ScoreResult(Score(1.0))]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("single", r"takes \(output, row\); it is called as \(outputs, rows\): leave reward\.batch=true out"),
        ("single_ignoring", r"or name its parameters \(outputs, rows\)"),
        (
            "of_three",
            r"takes \(answers, questions, more\); it is called as \(outputs, rows\): missing a required",
        ),
    ],
)
def test_a_function_of_one_trajectory_is_refused_with_batch(file: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_batch_reward(f"{file}:{name}", timeout_s=1)


@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward.reward_manager.name"])
def test_verls_reward_managers_are_accepted_or_refused_with_a_message(key: str) -> None:
    assert load_config(overrides=[f"{key}=batch"]).reward.batch is True
    assert load_config(overrides=[f"{key}=naive"]).reward.batch is False
    with pytest.raises(ConfigError, match=f"{key} is 'mine': input should be 'naive', 'batch'"):
        load_config(overrides=[f"{key}=mine"])


def test_the_example_in_the_docs_scores_a_group(tmp_path: Path) -> None:
    page = Path("docs/how-to.md").read_text(encoding="utf-8")
    [code] = [
        code
        for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        if "brief_and_right" in code
    ]
    [settings] = [
        text for text in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL) if "batch: true" in text
    ]
    (tmp_path / "task.py").write_text(code)
    (tmp_path / "config.yaml").write_text(settings.replace("task.py", f"{tmp_path}/task.py"))
    function = load_reward_function(load_config(tmp_path / "config.yaml"))
    assert isinstance(function, BatchRewardFunction)

    def output(text: str) -> AgentLoopOutput:
        messages = [{"role": "assistant", "content": text}]
        ids = list(range(len(text)))
        return AgentLoopOutput(
            prompt_ids=[1], response_ids=ids, response_mask=[1] * len(ids), messages=messages
        )

    outputs = [output("It is 7."), output("7"), output("8")]
    verdicts = run_virtual(function(outputs, [{"answer": "7"}] * 3))
    assert [verdict.score for verdict in verdicts] == [
        Score(0.5, {"length": 8}),
        Score(1.0, {"length": 1}),
        Score(0.0, {"length": 1}),
    ]
