"""Reward functions that are called once for all trajectories of a row, and their rewards in a journal."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, Config, RolloutConfig, load_config
from agent_loop.errors import ConfigError, RolloutError
from agent_loop.rewards.function import BatchRewardFunction, Score, ScoreResult, load_batch_reward
from agent_loop.rollout.components import load_reward_function
from agent_loop.rollout.journal import open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.types import Row, StopReason
from tests.helpers import hermes_template, text_reply, user
from tests.rollout.journaled import facts, key_of

pytestmark = pytest.mark.virtual_time
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


def make_manager(
    reward: BatchReward,
    *,
    num_workers: int = 1,
    agent: str = "tool_agent",
    script: Any = None,
    **settings: Any,
) -> AgentLoopManager:
    return AgentLoopManager(
        RolloutConfig(
            **{"n": N, "max_failed_share": 1.0, **settings},
            agent=AgentConfig(num_workers=num_workers, default_agent_loop=agent),
        ),
        servers=[ScriptedServer(script or CountingScript())],
        template=hermes_template(),
        reward=BatchRewardFunction(reward, timeout_s=60, name="judge"),
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


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_each_group_is_scored_by_one_call_however_workers_share_its_rollouts(num_workers: int) -> None:
    judge = Judge()
    trajectories = await make_manager(judge, num_workers=num_workers).run(rows(3))
    assert sorted(numbers for _, numbers in judge.calls) == [[n] * N for n in range(3)]
    answers = [t.output.answer for t in trajectories]
    by_row = {numbers[0]: said for said, numbers in judge.calls}
    assert [by_row[n] for n in range(3)] == [answers[N * n : N * n + N] for n in range(3)]
    assert [t.reward for t in trajectories] == [float(answer) for answer in answers]
    assert [(t.group, t.rollout) for t in trajectories] == [(g, n) for g in range(3) for n in range(N)]


async def test_concurrent_runs_do_not_mix_their_groups() -> None:
    judge = Judge()
    manager = make_manager(judge)
    steps = await asyncio.gather(*(manager.run(rows(2), label=f"step={n}") for n in range(3)))
    assert sorted(numbers for _, numbers in judge.calls) == [[0] * N] * 3 + [[1] * N] * 3
    assert all(t.reward == float(t.output.answer) for step in steps for t in step)


async def test_a_stream_and_a_callback_get_whole_groups() -> None:
    manager, told = make_manager(Judge(), num_workers=2), list[int]()
    async with aclosing(manager.stream(rows(3))) as stream:
        streamed = [trajectory async for trajectory in stream]
    await manager.run(rows(3), on_trajectory=lambda t: told.append(t.group))
    assert all(t.reward is not None for t in streamed)
    for groups in ([t.group for t in streamed], told):
        assert [groups[place] for place in range(0, 3 * N, N) for _ in range(N)] == groups


async def test_a_cancelled_trajectory_does_not_keep_its_group_from_being_scored() -> None:
    judge = Judge()
    manager = make_manager(judge)
    asyncio.get_running_loop().call_later(0.5, manager.cancel, "group=0/rollout=2")
    trajectories = await manager.run(rows(1))
    assert trajectories[2].output.stop_reason is StopReason.CANCELLED
    assert [t.reward is None for t in trajectories] == [False, False, True, False]
    assert [len(said) for said, _ in judge.calls] == [N - 1]


async def test_a_group_with_a_resumable_trajectory_is_scored_after_it_has_ended() -> None:
    judge, work, told = Judge(), rows(2), list[Trajectory]()
    manager = make_manager(judge, agent="partial_tool_agent")
    asyncio.get_running_loop().call_later(2.5, manager.cancel_all)
    first = await manager.run(work)
    assert not judge.calls
    assert {t.output.stop_reason for t in first} == {StopReason.ANSWERED, StopReason.CANCELLED}
    assert {t.reward for t in first} == {None}
    second = await manager.run(work, earlier=first, on_trajectory=told.append)
    assert sorted(map(id, told)) == sorted(map(id, second))
    assert sorted(numbers for _, numbers in judge.calls) == [[0] * N, [1] * N]
    assert all(t.reward == float(t.output.answer) for t in second)


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
        (lambda count: 0.5, r"judge returned 0.5 \(float\) for 4 outputs; return a list with one reward"),
        (lambda count: "four", r"judge returned 'four' \(str\) for 4 outputs"),
        (lambda count: {"reward": 1.0}, "judge returned .*; return a list"),
        (raises, "judge raised KeyError: 'truth'; fix it"),
        (hangs, r"judge took longer than 60 s; fix it, or raise reward\.timeout_s"),
    ],
)
async def test_a_failing_call_fails_the_trajectories_of_its_group_and_no_others(bad: Any, says: str) -> None:
    trajectories = await make_manager(of_row_1(bad), num_workers=2).run(rows(3))
    assert rewards_of(trajectories) == [[1.0] * N, [None] * N, [1.0] * N]
    errors = errors_of(trajectories)
    assert len(errors) == N
    assert all(re.match(f"RewardError: reward function {says}", error) for error in errors)
    assert all(t.output.messages for t in trajectories)
    assert {t.output.stop_reason for t in trajectories[N : 2 * N]} == {StopReason.FAILED}


async def test_an_invalid_value_fails_its_trajectory_alone_and_an_unstorable_one_is_an_incident() -> None:
    odd = {"reward": 1.0, "lock": threading.Lock()}
    trajectories = await make_manager(of_row_1(lambda count: [0.5, odd, float("nan"), 0.5])).run(rows(2))
    assert rewards_of(trajectories) == [[1.0] * N, [0.5, 1.0, None, 0.5]]
    [error] = errors_of(trajectories)
    assert error.startswith("RewardError: reward function judge, at index 2, returned nan (float)")
    kinds = [[incident.kind for incident in t.output.incidents] for t in trajectories[N:]]
    assert kinds == [[], [IncidentKind.UNSTORABLE_VALUE], [], []]


async def test_too_many_failed_rewards_end_the_run() -> None:
    with pytest.raises(RolloutError, match=r"4 of 12 trajectories failed.* 'truth'"):
        await make_manager(of_row_1(raises), max_failed_share=0.25).run(rows(3))


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
async def test_a_reference_loads_a_batch_function(file: Path, name: str) -> None:
    config = Config.model_validate({"reward": {"function": f"{file}:{name}", "batch": True}})
    function = load_reward_function(config)
    assert isinstance(function, BatchRewardFunction)
    assert await function([OUTPUT], [{}]) == [ScoreResult(Score(1.0))]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("single", r"takes \(output, row\); it is called as \(outputs, rows\): leave reward\.batch=true out"),
        ("single_ignoring", r"or name its parameters \(outputs, rows\)"),
        ("of_three", r"takes \(answers, questions, more\); it is called as \(outputs, rows\): missing a"),
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
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", Path("docs/how-to.md").read_text(), flags=re.DOTALL)
    [code] = [block for block in blocks if "def brief_and_right" in block]
    [settings] = [block for block in blocks if "batch: true" in block]
    (tmp_path / "task.py").write_text(code)
    (tmp_path / "config.yaml").write_text(settings.replace("task.py", f"{tmp_path}/task.py"))
    function = load_reward_function(load_config(tmp_path / "config.yaml"))
    assert isinstance(function, BatchRewardFunction)
    outputs = [
        AgentLoopOutput(
            prompt_ids=[1],
            response_ids=[2] * len(text),
            response_mask=[1] * len(text),
            messages=[{"role": "assistant", "content": text}],
        )
        for text in ("It is 7.", "7", "8")
    ]
    verdicts = run_virtual(function(outputs, [{"answer": "7"}] * 3))
    expected = [Score(0.5, {"length": 8}), Score(1.0, {"length": 1}), Score(0.0, {"length": 1})]
    assert [verdict.score for verdict in verdicts] == expected


LATENCIES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
"""Seconds that trajectories take, in the order in which they begin: group 0 ends after 3 s, group 1 after 6 s."""


@dataclass
class Trial:
    """A run of two groups of three whose samples all differ, and a judge that records its calls."""

    path: Path
    first: int = 0
    bonus: float = 0.0
    spoils: Callable[[list[Any]], Any] = lambda rewards: rewards
    hangs_on: int | None = None
    broken: Sequence[int] = ()
    killed_after_s: float | None = None

    def __post_init__(self) -> None:
        self.num_requests = 0
        self.judged: list[list[str]] = []
        self.trajectories = run_virtual(self._run(rows(2)))

    async def _run(self, rows: list[Row]) -> list[Trajectory]:
        manager = make_manager(self._judge, script=self._answer, n=3, num_workers=2)
        async with open_journal(self.path, key=key_of(rows), rows=rows, resume=True) as journal:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.killed_after_s):
                    return await manager.run(rows, journal=journal)
        return []

    def _answer(self, _: ScriptedRequest) -> ScriptedReply:
        place = self.num_requests
        self.num_requests += 1
        error = "broken" if place in self.broken else None
        return text_reply(str(self.first + place), latency_s=LATENCIES[place], error=error)

    async def _judge(self, outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        self.judged.append([output.answer for output in outputs])
        if rows[0]["number"] == self.hangs_on:
            await asyncio.Event().wait()
        return self.spoils(
            [{"reward": float(output.answer) + self.bonus, "of": len(outputs)} for output in outputs]
        )

    @property
    def rewards(self) -> list[float | None]:
        return [trajectory.reward for trajectory in self.trajectories]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_a_group_killed_between_its_end_and_its_reward_is_scored_without_being_run(path: Path) -> None:
    assert Trial(path, hangs_on=1, killed_after_s=20).trajectories == []
    again = Trial(path, bonus=100)
    assert (again.num_requests, again.judged) == (0, [["3", "4", "5"]])
    assert again.rewards == [0.0, 1.0, 2.0, 103.0, 104.0, 105.0]
    assert [t.reward_extra for t in again.trajectories] == [{"of": 3}] * 6


def test_a_group_that_was_killed_before_it_had_ended_is_scored_as_a_whole(path: Path) -> None:
    assert Trial(path, killed_after_s=4.5).judged == [["0", "1", "2"]]
    again = Trial(path, first=50)
    assert (again.num_requests, again.judged) == (2, [["3", "50", "51"]])
    assert again.rewards == [0.0, 1.0, 2.0, 3.0, 50.0, 51.0]


def test_a_complete_run_is_replayed_with_its_rewards_and_failures(path: Path) -> None:
    before = Trial(path, spoils=lambda rewards: [*rewards[:-1], float("nan")])
    assert before.rewards == [0, 1, None, 3, 4, None]
    again = Trial(path, bonus=100)
    assert (again.num_requests, again.judged) == (0, [])
    for old, new in zip(before.trajectories, again.trajectories, strict=True):
        assert facts(new) == facts(old)
        assert (new.output.failure, new.reward_extra) == (old.output.failure, old.reward_extra)


def test_a_trajectory_whose_reward_failed_is_scored_again_and_not_run_again(path: Path) -> None:
    Trial(path, hangs_on=1, spoils=lambda rewards: [rewards[0], "?", rewards[2]], killed_after_s=20)
    again = Trial(path, bonus=100)
    assert again.num_requests == 0
    assert sorted(again.judged) == [["0", "1", "2"], ["3", "4", "5"]]
    assert again.rewards == [0.0, 101.0, 2.0, 103.0, 104.0, 105.0]
    assert {t.output.stop_reason for t in again.trajectories} == {StopReason.ANSWERED}


def test_a_failed_trajectory_is_run_again_and_the_recorded_rewards_of_its_group_are_kept(path: Path) -> None:
    assert Trial(path, hangs_on=1, broken=[1], killed_after_s=30).judged[0] == ["0", "2"]
    again = Trial(path, first=50, bonus=100)
    assert again.num_requests == 1
    assert sorted(again.judged) == [["0", "50", "2"], ["3", "4", "5"]]
    assert again.rewards == [0.0, 150.0, 2.0, 103.0, 104.0, 105.0]
    assert [t.reward_extra["of"] for t in again.trajectories] == [2, 3, 2, 3, 3, 3]


@pytest.mark.parametrize("seconds", [0.5, 2.5, 4.5])
def test_wherever_a_run_is_killed_each_trajectory_gets_one_reward(path: Path, seconds: float) -> None:
    Trial(path, killed_after_s=seconds)
    again = Trial(path, first=50)
    assert again.rewards == [float(t.output.answer) for t in again.trajectories]
    assert len(again.trajectories) == 6
