"""A judge, and an environment, behind a process that is killed in the middle of a batch."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from agent_loop.environments.base import Environment, Reply
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.rewards.function import RewardFunction
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Row
from tests.helpers import hermes_template, text_reply, user
from tests.rollout.harness import WorkerHarness
from tests.rollout.outages import retries_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_ROWS = 48
KILLED_AT = 20
"""Number of verdicts that have been requested when the judge is killed."""


class JudgeProcess:
    """Judge that can be killed and started again on its port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("judge_server.py")), str(self.port)]
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


Post = Callable[[str, str], Awaitable[str]]
CLIENTS = [with_urllib, with_httpx, with_aiohttp]


class Batch:
    """Rows whose answers a judge scores. The judge is killed while it scores some of them.

    Args:
        judge: The judge.
        post: Sends a request to it.
        comes_back: Whether the judge is started again.
        in_environment: Whether an environment asks the judge. Otherwise a reward function does.
        retries: Maximum number of repetitions.
    """

    def __init__(
        self, judge: JudgeProcess, *, post: Post, comes_back: bool, in_environment: bool, retries: int
    ) -> None:
        self._judge = judge
        self._post = post
        self._comes_back = comes_back
        self._num_verdicts = 0
        environments = {"judged": EnvironmentFactory(lambda: Judged(self.verdict), where="judged")}
        self.harness = WorkerHarness(
            echo,
            environments=environments,
            agent="environment_agent" if in_environment else "single_turn_agent",
            reward=None if in_environment else RewardFunction(self._score, timeout_s=60),
            retries=retries,
        )

    def run(self) -> list[Trajectory]:
        rows = [{"raw_prompt": user(f"say {n}"), "environment": "judged"} for n in range(NUM_ROWS)]

        async def run() -> list[Trajectory]:
            trajectories = await self.harness.worker.run(self.harness.jobs(rows))
            self.harness.assert_nothing_is_left()
            return trajectories

        return asyncio.run(run())

    async def verdict(self, answer: str) -> float:
        """Ask the judge about an answer. Kill the judge while it works on several answers, and before this one."""
        self._num_verdicts += 1
        is_last = self._num_verdicts == KILLED_AT
        if is_last:
            self._judge.kill()
        try:
            return float(await self._post(self._judge.url, answer))
        finally:
            if is_last and self._comes_back:
                self._judge.start()

    async def _score(self, output: AgentLoopOutput, row: Row) -> float:
        return await self.verdict(output.answer)


class Judged(Environment):
    """Environment with one turn, whose reward is a verdict of the judge."""

    def __init__(self, verdict: Callable[[str], Awaitable[float]]) -> None:
        self._verdict = verdict

    def reset(self, row: Mapping[str, Any]) -> None:
        pass

    def reply(self, messages: Any) -> Reply:
        return Reply(is_over=True)

    async def reward(self, messages: Any) -> float:
        return await self._verdict(next(m["content"] for m in messages if m["role"] == "assistant"))


def echo(request: ScriptedRequest) -> ScriptedReply:
    """Answer with the number in the prompt, at a different time for each of them."""
    text = hermes_template().decode(request.prompt_ids.tolist())
    number = text.partition("say ")[2].partition("<")[0]
    return text_reply(number, latency_s=0.02 * int(number))


@pytest.mark.parametrize("in_environment", [False, True], ids=["reward", "environment"])
@pytest.mark.parametrize("post", CLIENTS)
def test_a_judge_that_is_killed_and_comes_back_scores_every_trajectory_rightly(
    judge: JudgeProcess, post: Post, in_environment: bool
) -> None:
    batch = Batch(judge, post=post, comes_back=True, in_environment=in_environment, retries=5)
    trajectories = batch.run()
    assert [t.reward for t in trajectories] == [n / 100 for n in range(NUM_ROWS)]
    assert all(t.output.failure is None for t in trajectories)
    num_retries = sum(len(retries_of(t)) for t in trajectories)
    assert num_retries > 0
    num_requests = len(batch.harness.server.requests)
    assert num_requests == (NUM_ROWS + num_retries if in_environment else NUM_ROWS)
