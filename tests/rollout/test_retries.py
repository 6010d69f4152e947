"""Trajectories that infrastructure failed run again, a limited number of times, and never get a made-up reward."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from http.client import IncompleteRead
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.errors import (
    EnvironmentBug,
    EnvironmentUnavailable,
    RewardError,
    RewardUnavailable,
    ServerDied,
    ToolBug,
    WorkspaceError,
)
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import BatchRewardFunction, RewardFunction
from agent_loop.rollout.failures import failure_of
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.isolated_task import Abandoned
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.training.metrics import FAILURES, RETRIES
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import AgentLoopOutput, FailureKind, Trajectory
from agent_loop.types import Row, StopReason
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.rollout.harness import METHODS, Adder, Line, Outage, WorkerHarness, retries_of, station_row


def adds_once(request: ScriptedRequest) -> ScriptedReply:
    """Call the tool in the first turn, and answer in the second one."""
    return tool_call_reply("add", a=1, b=2) if request.turn == 0 else text_reply("3")


def answers(_: ScriptedRequest) -> ScriptedReply:
    return text_reply("3")


def stationed(outage: Outage, *, retries: int, **options: Any) -> WorkerHarness:
    return WorkerHarness(adds_once, environments={"station": outage.factory}, retries=retries, **options)


def metrics_of(*trajectories: Trajectory) -> dict[str, float]:
    return rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("num_failures", "retries"), [(2, 2), (99, 0), (99, 1), (99, 3)])
def test_a_trajectory_runs_again_until_its_environment_is_there(
    method: str, num_failures: int, retries: int
) -> None:
    outage = Outage(method=method, num_failures={0: num_failures})
    trajectory = stationed(outage, retries=retries).run_one(**station_row())
    assert (outage.num_attempts[0], outage.num_open) == (retries + 1, 0)
    error = f"the trajectory ran again after EnvironmentUnavailable: the station is down in {method}"
    assert retries_of(trajectory) == [error] * retries
    metrics, failure = metrics_of(trajectory), trajectory.output.failure
    assert metrics.get(RETRIES, 0) == retries
    if num_failures <= retries:
        assert (trajectory.reward, failure) == (1.0, None)
        assert trajectory.output.num_assistant_turns == 2
        assert f"{FAILURES}environment" not in metrics
    else:
        assert (trajectory.reward, trajectory.output.stop_reason) == (None, StopReason.FAILED)
        assert failure is not None
        assert failure.kind is FailureKind.ENVIRONMENT
        assert metrics[f"{FAILURES}environment"] == 1


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
    run_virtual(harness.worker.run([Job(station_row(), 0, 0, {}, seed=7)]))
    seeds = [request.sampling_params.seed for request in harness.server.requests]
    assert len(seeds) == 4
    assert seeds[:2] == seeds[2:]


@pytest.mark.parametrize(
    ("on_replay", "num_conversations"),
    [(OnReplay.ONCE, 1), (OnReplay.RESTART, 2), (OnReplay.RERUN, 2), (OnReplay.RECORDED, 2)],
)
def test_a_trajectory_with_a_once_only_tool_runs_once(on_replay: OnReplay, num_conversations: int) -> None:
    tool, line = Adder(), Line(num_failures=1)
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


@register("has_a_bug")
class HasABug(AgentLoopBase):
    """Loop that raises an error of its own."""

    num_runs = 0

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        HasABug.num_runs += 1
        raise KeyError("no such column")


def test_failed_requests_to_llm_servers_and_bugs_do_not_run_again() -> None:
    num_requests: list[int] = []
    for retries in (0, 3):
        harness = WorkerHarness(lambda _: ScriptedReply([1], error="no memory"), retries=retries)
        of_server = harness.run_one()
        num_requests.append(len(harness.server.requests))
    assert num_requests[0] == num_requests[1]
    HasABug.num_runs = 0
    of_bug = WorkerHarness(answers, agent="has_a_bug", retries=3).run_one()
    assert HasABug.num_runs == 1
    for trajectory, kind in ((of_server, FailureKind.SERVER), (of_bug, FailureKind.CODE)):
        assert trajectory.output.failure is not None
        assert trajectory.output.failure.kind is kind
        assert retries_of(trajectory) == []


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


@pytest.mark.virtual_time
async def test_a_trajectory_that_is_cancelled_while_it_waits_for_its_repetition_ends_at_once() -> None:
    outage, loop = Outage(num_failures={0: 99}), asyncio.get_running_loop()
    harness = stationed(outage, retries=9)
    [job] = harness.jobs([station_row()])
    loop.call_later(10, harness.worker.cancel, job.trajectory_id)  # in the wait from 7 to 15 s
    [trajectory] = await harness.worker.run([job])
    harness.assert_nothing_is_left()
    assert loop.time() == pytest.approx(10, abs=0.1)
    assert outage.num_attempts[0] == 4
    assert trajectory.reward is None
    assert trajectory.output.failure is not None
    assert len(retries_of(trajectory)) == 3


class Judge:
    """Reward function whose server is down for the first calls."""

    def __init__(self, num_failures: int, *, error: Callable[[], Exception] | None = None) -> None:
        self.num_calls = 0
        self._num_failures = num_failures
        self._error = error or (lambda: RewardUnavailable("the judge is down"))

    async def score(self, output: AgentLoopOutput, row: Row) -> float:
        return (await self.score_group([output], [row]))[0]

    async def score_group(self, outputs: list[AgentLoopOutput], rows: list[Row]) -> list[float]:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise self._error()
        return [0.75] * len(outputs)


def run_groups(
    judge: Any, server: ScriptedServer, *, agent: str = "tool_agent", **settings: Any
) -> list[Trajectory]:
    """Run one row three times, and judge its trajectories as a group."""
    config = RolloutConfig(
        n=3, max_failed_share=1.0, agent=AgentConfig(default_agent_loop=agent, num_workers=1), **settings
    )
    reward = BatchRewardFunction(judge, timeout_s=60)
    manager = AgentLoopManager(config, servers=[server], template=hermes_template(), reward=reward)
    return run_virtual(manager.run([{"raw_prompt": user("?")}]))


@pytest.mark.parametrize(
    "error",
    [lambda: RewardUnavailable("down"), ConnectionRefusedError, TimeoutError],
    ids=["unavailable", "refused", "timeout"],
)
def test_a_reward_function_that_failed_alone_runs_again_alone(error: Callable[[], Exception]) -> None:
    judge = Judge(2, error=error)
    harness = WorkerHarness(answers, reward=RewardFunction(judge.score, timeout_s=1), retries=2)
    trajectory = harness.run_one()
    assert (judge.num_calls, len(harness.server.requests)) == (3, 1)
    assert (trajectory.reward, trajectory.output.failure) == (0.75, None)
    first, second = retries_of(trajectory)
    assert first == second
    assert first.startswith("the reward function ran again after Reward")
    assert metrics_of(trajectory)[RETRIES] == 2


@pytest.mark.parametrize(("num_failures", "reward"), [(2, 0.75), (99, None)])
def test_a_group_whose_judge_was_away_is_judged_again(num_failures: int, reward: float | None) -> None:
    judge, server = Judge(num_failures), ScriptedServer(answers)
    trajectories = run_groups(judge.score_group, server, retries=2)
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

    trajectories = run_groups(judge, ScriptedServer(answers), agent="two_outputs", retries=0)
    assert sizes == [4]
    assert [t.reward for t in trajectories if t.output.failure is None] == [0.25] * 4
    assert [t.reward for t in trajectories if t.output.failure is not None] == [None]


REQUEST = httpx.Request("POST", "http://127.0.0.1/")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "is_retried"),
    [
        (EnvironmentUnavailable("down"), FailureKind.ENVIRONMENT, True),
        (caused(EnvironmentBug("x"), ConnectionRefusedError()), FailureKind.ENVIRONMENT, True),
        (caused(EnvironmentBug("x"), ZeroDivisionError()), FailureKind.CODE, False),
        (WorkspaceError("killed"), FailureKind.WORKSPACE, True),
        (caused(RewardError("x"), RewardUnavailable("judge is down")), FailureKind.REWARD, True),
        (caused(RewardError("x"), TimeoutError()), FailureKind.REWARD, True),
        (caused(RewardError("x"), IncompleteRead(b"")), FailureKind.REWARD, True),
        (caused(RewardError("x"), aiohttp.ServerDisconnectedError()), FailureKind.REWARD, True),
        (caused(RewardError("x"), aiohttp.ClientPayloadError()), FailureKind.REWARD, True),
        (caused(RewardError("x"), httpx.ConnectError("refused")), FailureKind.REWARD, True),
        (caused(RewardError("x"), httpx.RemoteProtocolError("disconnected")), FailureKind.REWARD, True),
        (caused(EnvironmentBug("x"), httpx.ReadTimeout("slow")), FailureKind.ENVIRONMENT, True),
        (caused(RewardError("x"), openai.APIConnectionError(request=REQUEST)), FailureKind.REWARD, True),
        (caused(RewardError("x"), openai.APITimeoutError(REQUEST)), FailureKind.REWARD, True),
        (caused(RewardError("x"), httpx.UnsupportedProtocol("ftp")), FailureKind.CODE, False),
        (caused(RewardError("x"), httpx.InvalidURL("?")), FailureKind.CODE, False),
        (caused(RewardError("x"), Abandoned("still runs")), FailureKind.CODE, False),
        (caused(ToolBug("x"), ConnectionResetError()), FailureKind.CODE, False),
        (ServerDied("gone"), FailureKind.SERVER, False),
    ],
)
def test_what_may_succeed_later_is_retried(error: Exception, kind: FailureKind, is_retried: bool) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.is_retried) == (kind, is_retried)
    assert failure.is_infrastructure == (kind is not FailureKind.CODE)


NUM_ROWS = 48
KILLED_AT = 20
"""Number of verdicts that have been requested when the judge is killed."""
JUDGE = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        number = int(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.05)
        body = str(number / 100).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass

class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
print("ready", flush=True)
server.serve_forever()
"""
"""Judge over HTTP: it returns a hundredth of the number that it is sent."""


class JudgeProcess:
    """Judge that can be killed and started again on its port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self) -> None:
        command = [sys.executable, "-c", JUDGE, str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def judge() -> Iterator[JudgeProcess]:
    process = JudgeProcess()
    yield process
    process.kill()


async def with_urllib(url: str, data: str) -> str:
    def post() -> str:
        with urllib.request.urlopen(url, data=data.encode(), timeout=30) as reply:
            return reply.read().decode()

    return await run_in_thread(post)


async def with_httpx(url: str, data: str) -> str:
    async with httpx.AsyncClient(timeout=30) as client:
        return (await client.post(url, content=data)).text


async def with_aiohttp(url: str, data: str) -> str:
    async with aiohttp.ClientSession() as session, session.post(url, data=data) as reply:
        return await reply.text()


def echo(request: ScriptedRequest) -> ScriptedReply:
    """Answer with the number in the prompt, at a different time for each of them."""
    text = hermes_template().decode(request.prompt_ids.tolist())
    number = text.partition("say ")[2].partition("<")[0]
    return text_reply(number, latency_s=0.02 * int(number))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("post", [with_urllib, with_httpx, with_aiohttp])
async def test_a_judge_that_is_killed_and_comes_back_scores_every_row(judge: JudgeProcess, post: Any) -> None:
    """Kill the judge while it works on several answers, and start it again."""
    asked: list[str] = []

    async def score(output: AgentLoopOutput, row: Row) -> float:
        asked.append(output.answer)
        is_last = len(asked) == KILLED_AT
        if is_last:
            judge.kill()
        try:
            return float(await post(judge.url, output.answer))
        finally:
            if is_last:
                judge.start()

    reward = RewardFunction(score, timeout_s=60)
    harness = WorkerHarness(echo, agent="single_turn_agent", reward=reward, retries=5)
    rows = [{"raw_prompt": user(f"say {n}")} for n in range(NUM_ROWS)]
    trajectories = await harness.worker.run(harness.jobs(rows))
    harness.assert_nothing_is_left()
    assert [t.reward for t in trajectories] == [n / 100 for n in range(NUM_ROWS)]
    assert all(t.output.failure is None for t in trajectories)
    assert sum(len(retries_of(t)) for t in trajectories) > 0
    assert len(harness.server.requests) == NUM_ROWS
