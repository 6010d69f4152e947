"""Tests of programs in threads and in separate processes, over a real port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import openai
import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.serve.gateway import openai_client, reachable
from agent_loop.serve.session import Session
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.types import StopReason
from tests.helpers import encoded, hermes_template, text_reply, tool_call_reply, user
from tests.serve.harness import ADD, MODEL, ProgramHarness, in_order, job, origins

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import openai

row = json.load(sys.stdin)
create = openai.OpenAI(max_retries=0).chat.completions.create
messages = [{"role": "user", "content": row["question"]}]
for _ in range(2):
    reply = create(model="m", messages=messages).choices[0].message
    messages += [reply, {"role": "user", "content": "go on"}]
print("thinking aloud")
print(json.dumps({"reward": 0.5, "said": reply.content}))
"""


def command(code: str, tmp_path: Path) -> list[str]:
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(code))
    return [sys.executable, str(file)]


def test_a_command_gets_its_row_and_endpoint_and_prints_its_reward(tmp_path: Path) -> None:
    harness = ProgramHarness(in_order(text_reply("one"), text_reply("two")))
    [trajectory] = asyncio.run(harness.run(None, command=command(PROGRAM, tmp_path), question="Why?"))
    assert trajectory.output.failure is None
    assert trajectory.reward == 0.5
    assert trajectory.output.extra_fields == {"said": "two"}
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]
    assert trajectory.output.messages[0]["content"] == "Why?"


def test_a_failed_command_leaves_the_end_of_its_standard_error(tmp_path: Path) -> None:
    code = """
        import openai
        openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        raise SystemExit("no luck")
    """
    [trajectory] = asyncio.run(
        ProgramHarness(in_order(text_reply("x"))).run(None, command=command(code, tmp_path))
    )
    assert trajectory.output.failure.error.endswith("the program exited with status 1: no luck")
    assert origins(trajectory.output) == ["prompt", "model"]


def test_a_command_that_cannot_be_started_is_a_failure() -> None:
    [trajectory] = asyncio.run(
        ProgramHarness(in_order(text_reply("x"))).run(None, command=["no-such-program"])
    )
    assert "cannot be started" in trajectory.output.failure.error


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    code = f"""
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path({str(tmp_path / "pids")!r}).write_text(str(child.pid))
        time.sleep(600)
    """
    harness = ProgramHarness(in_order(text_reply("x")), deadline_s=2.0)
    [trajectory] = asyncio.run(harness.run(None, command=command(code, tmp_path)))
    assert trajectory.output.stop_reason is StopReason.DEADLINE
    assert not is_running(int((tmp_path / "pids").read_text()))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_blocking_function_runs_in_a_thread_with_a_synchronous_client() -> None:
    def program(row: Any, *, base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["agent-loop"]
            first = client.chat.completions.create(model=MODEL, messages=user("?"), tools=[ADD])
            reply = first.choices[0].message
            answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}
            client.chat.completions.create(model=MODEL, messages=[*user("?"), reply, answer], tools=[ADD])
        return 1.0

    [trajectory] = asyncio.run(
        ProgramHarness(in_order(tool_call_reply("add", a=1, b=2), text_reply("3"))).run(program)
    )
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model"]


class AbortRecordingServer(ScriptedServer):
    """Server with an event that is set by `abort`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.was_aborted = asyncio.Event()

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.was_aborted.set()


def test_a_client_that_disconnects_in_a_stream_aborts_the_completion() -> None:
    text = "one two three four five six seven eight nine ten"

    async def program(row: Any, *, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=user("?"), stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await server.was_aborted.wait()
        return 1.0

    server = AbortRecordingServer(in_order(text_reply(text, latency_s=20)), streams=True)
    [trajectory] = asyncio.run(ProgramHarness([server]).run(program))
    assert trajectory.output.stop_reason is StopReason.CANCELLED
    sampled = trajectory.output.response_ids.tolist()
    assert sampled
    assert sampled == encoded(text)[: len(sampled)]


def context() -> LoopContext:
    server = ScriptedServer(in_order(text_reply("x")))
    return LoopContext(
        server_manager=AsyncLLMServerManager([server]),
        template=hermes_template(),
        limits=EpisodeLimits(prompt_length=512, response_length=512),
        multi_turn=MultiTurnConfig(),
    )


async def test_a_session_requires_its_key_and_its_port_is_closed_with_it() -> None:
    def status(url: str, key: str) -> tuple[int, str]:
        body = json.dumps({"model": "m", "messages": user("?")}).encode()
        request = Request(f"{url}/chat/completions", data=body, headers={"content-type": "application/json"})
        request.add_header("authorization", f"Bearer {key}")
        try:
            with urlopen(request) as response:
                return response.status, ""
        except HTTPError as error:
            reply = json.loads(error.read())
            error.close()
            return error.code, reply["error"]["code"]

    ask = asyncio.to_thread
    async with Session(context()) as session, reachable(session) as endpoint:
        assert await ask(status, endpoint.base_url, endpoint.api_key) == (200, "")
        assert await ask(status, endpoint.base_url, "other") == (401, "invalid_api_key")
        assert await ask(status, f"{endpoint.base_url}/x", endpoint.api_key) == (404, "not_found")
    with pytest.raises(URLError):
        await ask(urlopen, endpoint.base_url)


async def test_a_session_can_be_used_without_a_worker() -> None:
    session = Session(context())
    async with session, reachable(session) as endpoint, openai_client(endpoint) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=user("?"))
        assert reply.choices[0].message.content == "x"
    [output] = session.outputs(reward=1.0)
    assert (output.answer, output.reward_score) == ("x", 1.0)


def test_a_loop_without_a_program_is_refused() -> None:
    harness = ProgramHarness(in_order(text_reply("x")))
    [trajectory] = asyncio.run(harness.worker.run([job(None)]))
    assert "needs a program or a command" in trajectory.output.failure.error


@pytest.mark.parametrize("path", ["tests/serve/programs.py:asks_once", "tests.serve.programs:asks_once"])
def test_a_program_is_named_by_file_or_module(path: str) -> None:
    [trajectory] = asyncio.run(ProgramHarness(in_order(text_reply("x"))).run(path))
    assert trajectory.reward == 1.0


def test_the_example_runs_as_a_process_of_its_own() -> None:
    harness = ProgramHarness(in_order(tool_call_reply("multiply", a=6, b=7), text_reply("It is 42.")))
    agent = [sys.executable, "examples/openai_agent/agent.py"]
    [trajectory] = asyncio.run(harness.run(None, command=agent))
    assert trajectory.output.failure is None
    assert [m["content"] for m in trajectory.output.messages if m["role"] == "tool"] == ["42"]
    assert trajectory.output.answer == "It is 42."
