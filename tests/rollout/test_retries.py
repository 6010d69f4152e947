"""Trajectories that infrastructure failed run again, a limited number of times, and never get a made-up reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.errors import InteractionUnavailable, RewardUnavailable, WorkspaceError
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import BatchRewardFunction, RewardFunction
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.instances import OnReplay
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.training.metrics import FAILURES, RETRIES
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import AgentLoopOutput, FailureKind, Trajectory
from agent_loop.types import Row, StopReason
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness
from tests.rollout.outages import METHODS, Outage, retries_of, station_row


def adds_once(request: ScriptedRequest) -> ScriptedReply:
    """Call the tool in the first turn, and answer in the second one."""
    return tool_call_reply("add", a=1, b=2) if request.turn == 0 else text_reply("3")


def answers(_: ScriptedRequest) -> ScriptedReply:
    return text_reply("3")


def stationed(outage: Outage, *, retries: int, **options: Any) -> WorkerHarness:
    return WorkerHarness(adds_once, environments={"station": outage.factory}, retries=retries, **options)


def metrics_of(*trajectories: Trajectory) -> dict[str, float]:
    return rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)


# -- trajectories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_trajectory_runs_again_from_its_prompt_until_its_environment_is_there(method: str) -> None:
    outage = Outage(method=method, num_failures={0: 2})
    harness = stationed(outage, retries=2)
    trajectory = harness.run_one(**station_row())
    assert (outage.num_attempts[0], outage.num_open) == (3, 0)
    assert (trajectory.reward, trajectory.output.failure) == (1.0, None)
    assert trajectory.output.num_assistant_turns == 2
    error = f"the trajectory ran again after EnvironmentUnavailable: the station is down in {method}"
    assert retries_of(trajectory) == [error, error]
    metrics = metrics_of(trajectory)
    assert metrics[RETRIES] == 2
    assert f"{FAILURES}environment" not in metrics


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_trajectory_whose_environment_stays_away_fails_by_name_without_a_reward(
    method: str, retries: int
) -> None:
    outage = Outage(method=method, num_failures={0: 99})
    trajectory = stationed(outage, retries=retries).run_one(**station_row())
    assert (outage.num_attempts[0], outage.num_open) == (retries + 1, 0)
    assert trajectory.reward is None
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert trajectory.output.failure is not None
    assert trajectory.output.failure.kind is FailureKind.ENVIRONMENT
    assert len(retries_of(trajectory)) == retries
    metrics = metrics_of(trajectory)
    assert metrics[f"{FAILURES}environment"] == 1
    assert metrics.get(RETRIES, 0) == retries


def test_only_the_rows_that_failed_run_again() -> None:
    outage = Outage(num_failures={1: 1, 3: 9})
    trajectories = stationed(outage, retries=2).run([station_row(number) for number in range(5)])
    assert outage.num_attempts == {0: 1, 1: 2, 2: 1, 3: 3, 4: 1}
    assert [t.reward for t in trajectories] == [1.0, 1.0, 1.0, None, 1.0]
    assert [len(retries_of(t)) for t in trajectories] == [0, 1, 0, 2, 0]
    metrics = metrics_of(*trajectories)
    assert (metrics[RETRIES], metrics[f"{FAILURES}environment"]) == (3, 1)


def test_a_repetition_samples_with_the_seed_of_the_first_attempt() -> None:
    harness = stationed(Outage(num_failures={0: 1}), retries=1)
    job = harness.jobs([station_row()])[0]
    object.__setattr__(job, "seed", 7)
    run_virtual(harness.worker.run([job]))
    seeds = [request.sampling_params.seed for request in harness.server.requests]
    assert len(seeds) == 4
    assert seeds[:2] == seeds[2:]


class BadLine(ScriptedInteraction):
    """Simulated user whose server is down for the first conversations."""

    def __init__(self, *, num_failures: int) -> None:
        super().__init__(["Thanks."], name="line")
        self.num_conversations = 0
        self._num_failures = num_failures

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await super().start_interaction(instance_id, **kwargs)
        self.num_conversations += 1

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        if self.num_conversations <= self._num_failures:
            raise InteractionUnavailable("the simulated user's server is down")
        return await super().generate_response(instance_id, messages, **kwargs)


def test_a_trajectory_whose_simulated_user_is_away_has_a_new_conversation_and_none_of_the_old_turns() -> None:
    line = BadLine(num_failures=1)
    harness = WorkerHarness(answers, interactions={"line": line}, retries=1)
    trajectory = harness.run_one(interaction_kwargs={"name": "line"})
    assert (line.num_conversations, line.num_open) == (2, 0)
    assert trajectory.output.failure is None
    assert trajectory.output.num_assistant_turns == 2
    assert len(retries_of(trajectory)) == 1


@pytest.mark.parametrize(
    ("on_replay", "num_conversations"),
    [(OnReplay.ONCE, 1), (OnReplay.RESTART, 2), (OnReplay.RERUN, 2), (OnReplay.RECORDED, 2)],
)
def test_a_trajectory_that_used_a_tool_that_may_be_used_once_does_not_run_again(
    on_replay: OnReplay, num_conversations: int
) -> None:
    tool, line = Adder(), BadLine(num_failures=1)
    tool.on_replay = on_replay
    harness = WorkerHarness(adds_once, tools=[tool], interactions={"line": line}, retries=3)
    trajectory = harness.run_one(interaction_kwargs={"name": "line"})
    assert line.num_conversations == len(tool.executed) == num_conversations
    failure = trajectory.output.failure
    if on_replay is not OnReplay.ONCE:
        assert failure is None
        return
    assert failure is not None
    assert failure.kind is FailureKind.INTERACTION
    assert failure.error.endswith(
        "the simulated user's server is down; the trajectory did not run again, since tool 'add' was used and may "
        "be used only once"
    )
    assert retries_of(trajectory) == []
    assert trajectory.output.num_assistant_turns == 2


def breaks_down(_: ScriptedRequest) -> ScriptedReply:
    return ScriptedReply([1], error="no memory")


@register("has_a_bug")
class HasABug(AgentLoopBase):
    """Loop that raises an error of its own."""

    num_runs = 0

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        HasABug.num_runs += 1
        raise KeyError("no such column")


def test_failed_requests_to_llm_servers_and_bugs_do_not_run_again() -> None:
    harness = WorkerHarness(breaks_down, retries=3)
    of_server = harness.run_one()
    num_requests = len(harness.server.requests)
    once = WorkerHarness(breaks_down, retries=0)
    once.run_one()
    assert num_requests == len(once.server.requests)
    assert of_server.output.failure is not None
    assert of_server.output.failure.kind is FailureKind.SERVER

    HasABug.num_runs = 0
    of_bug = WorkerHarness(answers, agent="has_a_bug", retries=3).run_one()
    assert HasABug.num_runs == 1
    assert of_bug.output.failure is not None
    assert of_bug.output.failure.kind is FailureKind.CODE
    assert retries_of(of_server) == retries_of(of_bug) == []


@register("two_outputs")
class TwoOutputs(AgentLoopBase):
    """Loop with two outputs, the second of which is of a container that is killed in the first attempts."""

    num_runs = 0
    num_failures = 0

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        TwoOutputs.num_runs += 1
        is_killed = TwoOutputs.num_runs <= TwoOutputs.num_failures
        async with self.episode(row["raw_prompt"], tools={}) as episode:
            await episode.generate(sampling_params)
            if is_killed:
                raise WorkspaceError("the container was killed")
            await episode.finish()
            return [episode.output(), episode.output()]


def test_a_rollout_with_several_outputs_runs_again_as_a_whole_and_notes_it_once() -> None:
    TwoOutputs.num_runs, TwoOutputs.num_failures = 0, 2
    harness = WorkerHarness(
        answers, agent="two_outputs", retries=2, reward=RewardFunction(lambda *_: 0.5, timeout_s=1)
    )
    trajectories = harness.run([{"raw_prompt": user("?")}])
    assert TwoOutputs.num_runs == 3
    assert [(t.branch, t.reward) for t in trajectories] == [(0, 0.5), (1, 0.5)]
    assert [len(retries_of(t)) for t in trajectories] == [2, 0]
    assert metrics_of(*trajectories)[RETRIES] == 2


# -- cancellations -----------------------------------------------------------------------------------------------------


def test_a_trajectory_that_is_cancelled_while_it_waits_for_its_repetition_ends_at_once() -> None:
    outage = Outage(num_failures={0: 99})
    harness = stationed(outage, retries=9)

    async def scenario() -> tuple[Trajectory, float]:
        loop = asyncio.get_running_loop()
        [job] = harness.jobs([station_row()])
        loop.call_later(10, harness.worker.cancel, job.trajectory_id)  # in the wait from 7 to 15 s
        [trajectory] = await harness.worker.run([job])
        harness.assert_nothing_is_left()
        return trajectory, loop.time()

    trajectory, seconds = run_virtual(scenario())
    assert seconds == pytest.approx(10, abs=0.1)
    assert outage.num_attempts[0] == 4
    assert trajectory.reward is None
    assert trajectory.output.failure is not None
    assert len(retries_of(trajectory)) == 3


# -- rewards -----------------------------------------------------------------------------------------------------------


class Judge:
    """Reward function whose server is down for the first calls.

    Args:
        num_failures: Number of failing calls.
        error: Error of these calls.
    """

    def __init__(self, num_failures: int, *, error: Callable[[], Exception] | None = None) -> None:
        self.num_calls = 0
        self._num_failures = num_failures
        self._error = error or (lambda: RewardUnavailable("the judge is down"))

    async def score(self, output: AgentLoopOutput, row: Row) -> float:
        self._begin()
        return 0.75

    async def score_group(self, outputs: list[AgentLoopOutput], rows: list[Row]) -> list[float]:
        self._begin()
        return [0.75] * len(outputs)

    def _begin(self) -> None:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise self._error()


def judged(judge: Judge, *, retries: int) -> tuple[Trajectory, int]:
    """Return the trajectory of a row, and the number of its requests to the model's server."""
    harness = WorkerHarness(answers, reward=RewardFunction(judge.score, timeout_s=1), retries=retries)
    trajectory = harness.run_one()
    return trajectory, len(harness.server.requests)


@pytest.mark.parametrize(
    "error",
    [lambda: RewardUnavailable("down"), ConnectionRefusedError, TimeoutError],
    ids=["unavailable", "refused", "timeout"],
)
def test_a_reward_function_that_failed_alone_runs_again_without_a_new_rollout(
    error: Callable[[], Exception],
) -> None:
    judge = Judge(2, error=error)
    trajectory, num_requests = judged(judge, retries=2)
    assert (judge.num_calls, num_requests) == (3, 1)
    assert (trajectory.reward, trajectory.output.failure) == (0.75, None)
    first, second = retries_of(trajectory)
    assert first == second
    assert first.startswith("the reward function ran again after Reward")
    assert metrics_of(trajectory)[RETRIES] == 2


@pytest.mark.parametrize(("num_failures", "reward"), [(2, 0.75), (99, None)])
def test_a_group_whose_judge_was_away_is_judged_again_as_a_whole_without_a_new_rollout(
    num_failures: int, reward: float | None
) -> None:
    judge, server = Judge(num_failures), ScriptedServer(answers)
    config = RolloutConfig(n=3, retries=2, max_failed_share=1.0, agent=AgentConfig(num_workers=1))
    manager = AgentLoopManager(
        config,
        servers=[server],
        template=hermes_template(),
        reward=BatchRewardFunction(judge.score_group, timeout_s=60),
    )
    trajectories = run_virtual(manager.run([{"raw_prompt": user("?")}]))
    assert (judge.num_calls, len(server.requests)) == (3, 3)
    assert [t.reward for t in trajectories] == [reward] * 3
    assert [len(retries_of(t)) for t in trajectories] == [2, 0, 0]
    metrics = metrics_of(*trajectories)
    assert metrics[RETRIES] == 2
    assert metrics.get(f"{FAILURES}reward", 0) == (3 if reward is None else 0)


def test_the_judge_of_a_group_is_not_asked_about_its_lost_trajectories() -> None:
    TwoOutputs.num_runs, TwoOutputs.num_failures, sizes = 0, 1, list[int]()

    def judge(outputs: list[AgentLoopOutput], rows: list[Row]) -> list[float]:
        sizes.append(len(outputs))
        return [1.0 / len(outputs)] * len(outputs)

    manager = AgentLoopManager(
        RolloutConfig(
            n=3, retries=0, max_failed_share=1.0, agent=AgentConfig(default_agent_loop="two_outputs")
        ),
        servers=[ScriptedServer(answers)],
        template=hermes_template(),
        reward=BatchRewardFunction(judge, timeout_s=60),
    )
    trajectories = run_virtual(manager.run([{"raw_prompt": user("?")}]))
    assert sizes == [4]
    assert [t.reward for t in trajectories if t.output.failure is None] == [0.25] * 4
    assert [t.reward for t in trajectories if t.output.failure is not None] == [None]
