"""Environments behind servers of OpenEnv's own package, which run as processes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.environments import openenv
from agent_loop.errors import ConfigError
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import call_text, text_reply, tool_call_reply
from tests.rollout.harness import WorkerHarness
from tests.serve.harness import in_order

pytestmark = [pytest.mark.environments, pytest.mark.timeout(180)]

REWARD = 0.25
NEXT = in_order(text_reply("next"))


class Server:
    """A server that can be killed and started again on its port."""

    def __init__(self, kind: str, *, sessions: int = 128) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        program = Path(__file__).with_name("openenv_server.py")
        self._command = [sys.executable, str(program), kind, str(self.port), str(sessions)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    async def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < deadline:
                try:
                    async with http.get(f"{self.url}/health"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        raise TimeoutError(self.url)


@contextmanager
def serving(kind: str, **options: Any) -> Iterator[Server]:
    server = Server(kind, **options)
    try:
        asyncio.run(server.wait_until_ready())
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def count() -> Iterator[Server]:
    with serving("count") as server:
        yield server


def rows_of(*servers: Server, **options: Any) -> list[dict[str, Any]]:
    query = "&".join(f"{name}={value}" for name, value in {"size": 1, **options}.items())
    urls = ",".join(server.url for server in servers)
    return load_rows([f"openenv:{urls}?{query}"], prompt_key="prompt")


def play(rows: Sequence[dict[str, Any]], script: Script, **options: Any) -> list[Trajectory]:
    """Play rows, and check that nothing is left open."""

    async def run() -> list[Trajectory]:
        harness = WorkerHarness(script, agent="environment_agent", **options)
        trajectories = await harness.worker.run(harness.jobs(rows))
        harness.assert_nothing_is_left()
        return trajectories

    trajectories = asyncio.run(run())
    assert not +openenv._open_sessions
    return trajectories


def num_steps(seed: int) -> int:
    return 2 + seed % 3


def contents(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.output.messages]


def test_text_is_the_action_and_the_reward_is_the_sum_of_the_servers_rewards(count: Server) -> None:
    trajectories = play(rows_of(count, size=3, seed=3, instruction="Count."), NEXT)
    for seed, trajectory in enumerate(trajectories, 3):
        assert trajectory.output.failure is None
        assert trajectory.reward == num_steps(seed) * REWARD
        assert trajectory.output.extra_fields["num_steps"] == num_steps(seed)
        assert trajectory.output.extra_fields["is_done"] is True
        steps = num_steps(seed)
        assert contents(trajectory)[:3] == [f"Count.\n\n{steps} to go", "next", f"{steps - 1} to go"]


def test_a_limit_leaves_the_rewards_of_the_steps_so_far(count: Server) -> None:
    [trajectory] = play(rows_of(count, seed=2), NEXT, multi_turn=MultiTurnConfig(max_assistant_turns=2))
    assert trajectory.output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectory.output.extra_fields["is_done"] is False
    assert trajectory.reward in (REWARD, 2 * REWARD)


def test_an_exception_of_the_environment_is_a_failure_and_no_reward(count: Server) -> None:
    [trajectory] = play(rows_of(count), in_order(text_reply("next"), text_reply("back")))
    assert trajectory.reward is None
    assert "no such word: back (EXECUTION_ERROR)" in trajectory.output.failure.error


def test_an_action_with_several_fields_is_a_json_object_and_the_model_is_told_what_is_wrong() -> None:
    replies = ["one to two", '{"low": 1}', '```json\n{"low": 1, "high": 2}\n```', '{"low": 1, "high": 4}']
    with serving("guess") as server:
        [trajectory] = play(rows_of(server), in_order(*map(text_reply, replies)))
    assert trajectory.output.failure is None
    prompt, _, no_json, _, no_field, _, width, _ = contents(trajectory)[:8]
    assert "Give a range." in prompt
    assert '"high"' in prompt
    assert "not valid JSON" in no_json
    assert "high: Field required" in no_field
    assert width == "width 1"
    assert trajectory.reward == 4.0
    assert trajectory.output.extra_fields["num_steps"] == 2


def test_tools_of_a_server_are_the_models_tools() -> None:
    looks = text_reply(call_text("price_of", fruit="pear") + call_text("price_of", fruit="fig"))
    with serving("shop") as server:
        rows = rows_of(server, instruction="Buy the cheapest.")
        [trajectory] = play(rows, in_order(looks, tool_call_reply("buy", fruit="pear")))
        [silent] = play(rows, in_order(text_reply("no thanks")))
        [unasked] = play(rows_of(server), NEXT)
    assert trajectory.output.failure is None
    tool_texts = [m["content"] for m in trajectory.output.messages if m["role"] == "tool"]
    assert tool_texts[0] == "3"
    assert "fig" in tool_texts[1]
    assert trajectory.reward == 1.0
    assert trajectory.output.extra_fields["is_done"] is True
    assert silent.reward is None
    assert silent.output.failure is None
    assert "say what to do with instruction=" in unasked.output.failure.error


def test_a_server_without_room_is_waited_for_or_named() -> None:
    with serving("count", sessions=1) as server:
        trajectories = play(rows_of(server, size=3), NEXT)
        assert [t.reward for t in trajectories] == [num_steps(seed) * REWARD for seed in range(3)]
        crowded = play(rows_of(server, size=2, wait_s=0.5), in_order(text_reply("next", latency_s=1.0)))
    assert sorted(t.reward is None for t in crowded) == [False, True]
    [failed] = [t for t in crowded if t.reward is None]
    assert failed.output.failure.error.startswith(f"EnvironmentUnavailable: the OpenEnv server {server.url}")
    assert "CAPACITY_REACHED" in failed.output.failure.error


def test_a_server_that_is_down_is_passed_over(count: Server) -> None:
    with serving("count") as down:
        pass
    trajectories = play(rows_of(down, count, size=8), NEXT)
    assert [t.reward for t in trajectories] == [num_steps(seed) * REWARD for seed in range(8)]


def test_several_servers_share_the_trajectories(count: Server) -> None:
    seen: dict[str, int] = {}

    def script(request: ScriptedRequest) -> ScriptedReply:
        seen.update({url: max(seen.get(url, 0), n) for url, n in openenv._open_sessions.items()})
        return text_reply("next")

    with serving("count") as other:
        play(rows_of(count, other, size=16), script)
        assert seen[count.url] == seen[other.url] == 8


@pytest.mark.parametrize("retries", [0, 2])
def test_a_server_that_is_killed_in_a_batch_of_64_and_comes_back_makes_up_no_reward_and_loses_no_row(
    retries: int,
) -> None:
    with serving("count") as server:
        num_requests = 0

        def script(request: ScriptedRequest) -> ScriptedReply:
            nonlocal num_requests
            num_requests += 1
            if num_requests == 60:
                server.kill()
                server.start()
            return text_reply("next", latency_s=0.01 * (num_requests % 7))

        trajectories = play(rows_of(server, size=64), script, max_concurrent=32, retries=retries)
    assert len(trajectories) == 64
    broken = [t for t in trajectories if t.output.failure is not None]
    again = [t for t in trajectories if any(i.kind == "retried" for i in t.output.incidents)]
    assert bool(broken) == (not retries)
    assert bool(again) == bool(retries)
    for trajectory in broken:
        assert trajectory.reward is None
        error = trajectory.output.failure.error
        assert error.startswith(f"EnvironmentUnavailable: the OpenEnv server {server.url}")
    for seed, trajectory in enumerate(trajectories):
        if trajectory.output.failure is None:
            assert trajectory.reward == num_steps(seed) * REWARD
            assert trajectory.output.extra_fields["num_steps"] == num_steps(seed)
            assert trajectory.output.extra_fields["is_done"] is True


def test_the_split_of_a_row_depends_on_its_reset_alone() -> None:
    def seeds(url: str, split: str) -> list[int]:
        rows = load_rows([f"openenv:{url}?size=20&split={split}"], prompt_key="prompt")
        return [row["task"]["reset"]["seed"] for row in rows]

    assert not {*seeds("http://a:1", "train")} & {*seeds("http://b:2", "val")}
    assert seeds("http://a:1", "val") == seeds("http://b:2", "val")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("openenv:localhost:8000", "'localhost:8000' is not a URL"),
        ("openenv:http://a,b", "'b' is not a URL"),
        ("openenv:http://a?reset=[1]", r"\[1\]'; give a JSON object"),
        ("openenv:http://a?reset={", "not valid JSON"),
        ("openenv:http://a?sized=3", "did you mean 'size'"),
    ],
)
def test_wrong_sources_are_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows([source], prompt_key="prompt")
