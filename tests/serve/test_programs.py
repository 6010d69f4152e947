"""Tests of programs that are functions, threads, commands and graphs, in a worker and without one, over a real port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from functools import cache
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
from agent_loop.serve.program import AgentProgramLoop
from agent_loop.serve.session import Session
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import StopReason
from examples.langgraph_math.agent import solve
from tests.engines.common import assert_is_token_exact
from tests.helpers import encoded, hermes_template, text_reply, tool_call_reply, user
from tests.serve.applications import embedded, tiny_lm
from tests.serve.harness import ADD, MODEL, TEMPERATURE, ProgramHarness, in_order, job, origins, tokens

CALLS_THE_MODEL = """
import json, os, sys
from urllib.request import Request, urlopen
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""
TWO_TURNS = """
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


def python(code: str, *, is_light: bool = True) -> list[str]:
    return [sys.executable, *(["-S"] if is_light else []), "-c", textwrap.dedent(code)]


def run_command(command: Any, *replies: Any, limits: Any = None, **columns: Any) -> Trajectory:
    """Run a command against these replies, and return its only trajectory."""
    harness = ProgramHarness(in_order(*replies or "x"), **(limits or {}))
    [trajectory] = asyncio.run(harness.run(None, command=command, **columns))
    return trajectory


async def asks_once(row: Any, *, base_url: str, api_key: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="m", messages=user("?"))
    return 1.0


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_last_line_is_split_only_at_newlines() -> None:
    said = json.dumps({"reward": 1, "said": "one\u2028two"}, ensure_ascii=False)
    trajectory = run_command(python(CALLS_THE_MODEL + f"sys.stdout.buffer.write({said!r}.encode())"))
    assert (trajectory.reward, trajectory.output.extra_fields) == (1.0, {"said": "one\u2028two"})


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("python agent.py", "as a list of strings: [python, agent.py]"),
        ([], "as a list of strings: [python, agent.py]"),
        (["python", 1], "as a list of strings: [python, agent.py]"),
        (["no-such-program"], "cannot be started"),
        (None, "needs a program or a command"),
    ],
)
def test_what_cannot_be_started_is_a_failure(command: Any, error: str) -> None:
    columns = {} if command is None else {"command": command}
    [trajectory] = asyncio.run(ProgramHarness(in_order("x")).worker.run([job(None, **columns)]))
    assert error in trajectory.output.failure.error


def test_a_command_sees_no_secret_of_the_parent_unless_env_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL"):
        monkeypatch.setenv(name, "secret")
    shows = "print(json.dumps({'seen': sorted(k for k, v in os.environ.items() if v == 'secret')}))"
    harness = ProgramHarness(in_order("x"))
    command = python(CALLS_THE_MODEL + shows)
    loop = AgentProgramLoop(harness.worker._context, command=command, env={"TOKEN": "$HF_TOKEN"})
    output = asyncio.run(loop.run({}, raw_prompt=[]))
    assert isinstance(output, AgentLoopOutput)
    assert output.extra_fields == {"seen": ["TOKEN"]}


def test_a_command_runs_in_the_workspace_of_its_row_and_is_judged_by_its_check(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("before")
    writes = "open('file.txt', 'w').write('after'); print(json.dumps({'kept': sys.stdin.read(2)}))"
    check = {"command": ["grep", "-q", "after", "file.txt"]}
    rows = [{"workspace": {"folder": str(tmp_path), "check": check}}, {"workspace": {"folder": "absent"}}]
    harness = ProgramHarness(in_order("x"))
    jobs = [
        job(None, command=python(CALLS_THE_MODEL + writes), group=group, **row)
        for group, row in enumerate(rows)
    ]
    well, failed = asyncio.run(harness.worker.run(jobs))
    assert (well.reward, well.output.extra_fields["kept"]) == (1.0, '{"')
    assert well.output.extra_fields["check_exit_code"] == 0
    assert (tmp_path / "file.txt").read_text() == "before"
    assert "'absent', which is not a folder" in failed.output.failure.error


@pytest.mark.slow
def test_a_command_gets_its_row_and_endpoint_and_prints_its_reward() -> None:
    trajectory = run_command(python(TWO_TURNS, is_light=False), "one", "two", question="Why?")
    assert (trajectory.reward, trajectory.output.extra_fields) == (0.5, {"said": "two"})
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]
    assert trajectory.output.messages[0]["content"] == "Why?"


@pytest.mark.slow
def test_a_failed_command_leaves_the_end_of_its_standard_error() -> None:
    trajectory = run_command(python(CALLS_THE_MODEL + "raise SystemExit('no luck')"))
    assert trajectory.output.failure.error.endswith("the program exited with status 1: no luck")
    assert origins(trajectory.output) == ["prompt", "model"]


@pytest.mark.slow
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    code = f"""
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path({str(tmp_path / "pids")!r}).write_text(str(child.pid))
        time.sleep(600)
    """
    trajectory = run_command(python(code), limits={"deadline_s": 2.0})
    assert trajectory.output.stop_reason is StopReason.DEADLINE
    assert not is_running(int((tmp_path / "pids").read_text()))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.slow
def test_the_example_runs_as_a_process_of_its_own() -> None:
    agent = [sys.executable, "examples/openai_agent/agent.py"]
    output = run_command(agent, tool_call_reply("multiply", a=6, b=7), "It is 42.").output
    assert output.failure is None
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == ["42"]
    assert output.answer == "It is 42."


# -- functions ---------------------------------------------------------------------------------------------------------


def test_a_function_works_in_the_workspace_from_beside_it(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("given")

    async def program(row: Any, *, base_url: str, api_key: str, workspace: Any) -> dict[str, Any]:
        reward = await asks_once(row, base_url=base_url, api_key=api_key)
        return {"reward": reward / 2, "read": (await workspace.exec(["cat", "file.txt"])).stdout}

    harness = ProgramHarness(in_order("x"))
    [trajectory] = asyncio.run(harness.run(program, workspace={"folder": str(tmp_path)}))
    assert (trajectory.reward, trajectory.output.extra_fields["read"]) == (0.5, "given")


@pytest.mark.slow
def test_a_blocking_function_runs_in_a_thread_with_a_synchronous_client() -> None:
    def program(row: Any, *, base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["agent-loop"]
            first = client.chat.completions.create(model=MODEL, messages=user("?"), tools=[ADD])
            reply = first.choices[0].message
            answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}
            client.chat.completions.create(model=MODEL, messages=[*user("?"), reply, answer], tools=[ADD])
        return 1.0

    harness = ProgramHarness(in_order(tool_call_reply("add", a=1, b=2), "3"))
    [trajectory] = asyncio.run(harness.run(program))
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model"]


class AbortRecordingServer(ScriptedServer):
    """Server with an event that is set by `abort`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.was_aborted = asyncio.Event()

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.was_aborted.set()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("path", ["tests/serve/test_programs.py:asks_once", f"{__name__}:asks_once"])
def test_a_program_is_named_by_file_or_module(path: str) -> None:
    [trajectory] = asyncio.run(ProgramHarness(in_order("x")).run(path))
    assert trajectory.reward == 1.0


def test_a_graph_with_tools_is_one_trajectory_per_row() -> None:
    replies = [
        tool_call_reply("calculate", a=1, b=2, operand="@"),
        tool_call_reply("calculate", a=-1, b=3, operand="+"),
        text_reply("2"),
    ]
    harness = ProgramHarness(lambda request: replies[request.turn])
    for output in [t.output for t in asyncio.run(harness.run(*[solve] * 16))]:
        assert output.failure is None
        assert origins(output) == ["prompt", "model", "tool", "model", "tool", "model"]
        assert [m["content"] for m in output.messages if m["role"] == "tool"] == ["-1", "2"]


# -- sessions without a worker -----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_session_requires_its_key_and_its_port_is_closed_with_it() -> None:
    def status(url: str, key: str) -> tuple[int, str]:
        body = json.dumps({"model": "m", "messages": user("?")}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        try:
            with urlopen(Request(f"{url}/chat/completions", data=body, headers=headers)) as response:
                return response.status, ""
        except HTTPError as error:
            reply = json.loads(error.read())
            error.close()
            return error.code, reply["error"]["code"]

    context = LoopContext(
        server_manager=AsyncLLMServerManager([ScriptedServer(in_order("x"))]),
        template=hermes_template(),
        limits=EpisodeLimits(prompt_length=512, response_length=512),
        multi_turn=MultiTurnConfig(),
    )
    ask = asyncio.to_thread
    session = Session(context)
    async with session, reachable(session) as endpoint:
        assert await ask(status, endpoint.base_url, endpoint.api_key) == (200, "")
        assert await ask(status, endpoint.base_url, "other") == (401, "invalid_api_key")
        assert await ask(status, f"{endpoint.base_url}/x", endpoint.api_key) == (404, "not_found")
        async with openai_client(endpoint) as client:
            reply = await client.chat.completions.create(model=MODEL, messages=user("again?"))
        assert reply.choices[0].message.content == "x"
    with pytest.raises(URLError):
        await ask(urlopen, endpoint.base_url)
    assert [(each.answer, each.reward_score) for each in session.outputs(reward=1.0)] == [("x", 1.0)] * 2


# -- the embedded engine -----------------------------------------------------------------------------------------------

NUM_ROWS = 64


async def returns_its_tokens(create: Any) -> dict[str, Any]:
    """Run two turns, the second one streamed, and return the received token ids."""
    more: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "max_tokens": 12, "tools": [ADD]}
    messages: list[Any] = user("the quick brown fox")
    first = (await create(model=MODEL, messages=messages, **more)).choices[0]
    calls = first.message.tool_calls or ()
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
    messages += [first.message, *(answers or user("go on"))]
    stream = await create(model=MODEL, messages=messages, stream=True, logprobs=True, **more)
    streamed = [token async for chunk in stream for token in chunk.choices[0].model_extra["token_ids"]]
    return {"reward": 1.0, "received": [*first.token_ids, *streamed]}


@cache
def rolled_out(agent: Any) -> list[Trajectory]:
    """Return the trajectories of 64 concurrent programs on two servers."""
    servers = [embedded(f"embedded-{number}", max_model_len=512, seed=number) for number in range(2)]
    harness = ProgramHarness(servers, prompt_length=400, response_length=100)

    async def scenario() -> list[Any]:
        await harness.manager.pool.start()
        await harness.manager.pool.wake_up()
        try:
            return await harness.run(*[agent] * NUM_ROWS)
        finally:
            await harness.manager.pool.close()

    return asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("agent", [returns_its_tokens, solve])
def test_tokens_and_logprobs_match_the_model(agent: Any) -> None:
    """Check a program on the plain OpenAI client, and an unmodified LangGraph graph."""
    trajectories = rolled_out(agent)
    assert len(trajectories) == NUM_ROWS
    assert [trajectory.output.failure for trajectory in trajectories] == [None] * NUM_ROWS
    assert_is_token_exact(tiny_lm(), trajectories, temperature=TEMPERATURE)


@pytest.mark.slow
def test_programs_receive_the_token_ids_that_are_trained_on() -> None:
    trajectories = rolled_out(returns_its_tokens)
    for output in [trajectory.output for trajectory in trajectories]:
        assert output.stop_reason is StopReason.ANSWERED
        assert output.response_ids[output.response_mask == 1].tolist() == output.extra_fields["received"]
        assert output.response_logprobs is not None
        assert len(output.response_logprobs) == len(output.response_ids)
    assert len({tuple(tokens(t.output)) for t in trajectories}) > NUM_ROWS // 2
