"""MCP tools with a real server of the official SDK. Starting a server takes two seconds, so tests share servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError
from agent_loop.runtime.instances import OnReplay
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.tools.base import BaseTool
from agent_loop.tools.mcp.tools import mcp_tools
from agent_loop.tools.registry import load_tools
from agent_loop.tools.results import ToolResult
from agent_loop.tools.session import ToolSession
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import ToolCall
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import WorkerHarness
from tests.tools.harness import kind_of, session_of
from tests.tools.sandboxes import descendants

pytestmark = pytest.mark.slow

SERVER = str(Path(__file__).parent / "mcp_server.py")
STDIO: dict[str, Any] = {"command": sys.executable, "args": [SERVER]}


async def ask(session: ToolSession, name: str, **arguments: Any) -> ToolResult:
    return await session.execute(ToolCall(name, arguments))


async def text_of(session: ToolSession, name: str, **arguments: Any) -> str:
    result = await ask(session, name, **arguments)
    assert result.incident is None, result
    return str(result.response.text)


def started() -> set[int]:
    """Return the running servers on standard input and output that this process started."""
    found: set[int] = set()
    for pid in descendants():
        with suppress(OSError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if command[1:3] == [SERVER.encode(), b""]:
                found.add(pid)
    return found


class HttpServer:
    """MCP server over HTTP."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, SERVER, str(self.port)], stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < give_up
                assert self._process.poll() is None
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def http() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def stdio_tools() -> list[BaseTool]:
    tools = mcp_tools(STDIO)
    for tool in tools:
        if tool.name == "hang":
            tool.timeout_s = 1
    return tools


def test_tools_are_listed_with_their_schemas(stdio_tools: list[BaseTool]) -> None:
    tools = {tool.name: tool for tool in stdio_tools}
    assert set(tools) == {"add", "note", "whereabouts", "die", "hang", "fail", "show", "slow_to_check"}
    function = tools["add"].tool_schema["function"]
    assert function["description"] == "Add two integers."
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert function["parameters"]["required"] == ["a", "b"]
    assert tools["add"].on_replay is OnReplay.RECORDED
    assert tools["note"].on_replay is OnReplay.RESTART
    assert not started()


async def test_calls_of_one_trajectory_over_standard_input_and_output(stdio_tools: list[BaseTool]) -> None:
    session = session_of(*stdio_tools)
    assert await text_of(session, "add", a=1, b=2) == "3"
    assert await text_of(session, "note", text="x") == "1 notes"
    assert await text_of(session, "note", text="y") == "2 notes"
    assert len(started()) == 1, "the tools of a trajectory share its session"
    failed = await ask(session, "fail")
    assert (kind_of(failed), failed.response.text) == (IncidentKind.TOOL_ERROR, "no luck today")
    wrong = await ask(session, "add", a="x", b=2)
    assert kind_of(wrong) is IncidentKind.INVALID_ARGUMENTS
    shown = (await ask(session, "show")).response
    assert shown.text == (
        "a pixel:\na note\n[resource notes://rest 'the rest']\n[audio, audio/wav, not shown]"
    )
    assert shown.image is not None
    assert shown.image[0].startswith("data:image/png;base64,iVBOR")
    assert kind_of(await ask(session, "hang")) is IncidentKind.TOOL_TIMEOUT  # after a second
    assert await text_of(session, "slow_to_check") == "done", "its output schema is not checked"
    assert kind_of(await ask(session, "die")) is IncidentKind.TOOL_UNAVAILABLE
    after = await ask(session, "add", a=1, b=2)
    assert kind_of(after) is IncidentKind.TOOL_UNAVAILABLE
    assert after.response.text == "the MCP server has ended the session"
    assert await session.close() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not started()


async def test_a_shared_session_is_reopened_after_its_server_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_SECRET", "xyzzy")
    tools = mcp_tools({**STDIO, "session": "shared", "env": {"SECRET": "$THE_SECRET"}})
    first, second = session_of(*tools), session_of(*tools)
    pid, secret = (await text_of(first, "whereabouts")).split()
    assert secret == "xyzzy"
    assert (await text_of(second, "whereabouts")).split() == [pid, secret]
    waiting = asyncio.ensure_future(ask(second, "hang"))
    await asyncio.sleep(0.2)
    os.kill(int(pid), signal.SIGKILL)
    assert kind_of(await waiting) is IncidentKind.TOOL_UNAVAILABLE
    other_pid, _ = (await text_of(first, "whereabouts")).split()
    assert other_pid != pid
    assert (await text_of(second, "whereabouts")).split()[0] == other_pid
    assert await first.close() == []
    assert started() == {int(other_pid)}
    assert await second.close() == []
    assert not started()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "give exactly one of command and url"),
        ({"command": "x", "url": "http://y"}, "give exactly one of command and url"),
        ({"command": "/no/such/program"}, "the tools of the MCP server cannot be listed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "the tools of the MCP server cannot be listed"),
        ({"comand": "x"}, "did you mean 'command'"),
        ({"url": "http://127.0.0.1:9", "headers": {"X": "$NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE"),
        ({"mcp_servers_config_path": "/no/file.json"}, "cannot be read"),
    ],
)
def test_a_config_without_tools_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mcp_tools(config)


def test_a_registry_of_verl_selects_tools_from_a_file_of_servers(http: HttpServer, tmp_path: Path) -> None:
    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"mcpServers": {"notes": {"url": http.url, "auth_token": "t"}}}))
    registry = tmp_path / "tools.yaml"
    registry.write_text(
        f"""
        tools:
          - class_name: verl.tools.mcp_search_tool.MCPSearchTool
            config: {{type: mcp, rate_limit: 120, timeout: 20}}
            mcp:
              mcp_servers_config_path: {servers}
              tool_selected_list: [add, note]
        """
    )
    tools = load_tools([], config_path=registry)
    assert set(tools) == {"add", "note"}
    assert tools["add"].timeout_s == 20
    assert tools["add"].max_concurrent == 120
    registry.write_text(registry.read_text().replace("[add, note]", "[ad]"))
    with pytest.raises(ConfigError, match="did you mean 'add'"):
        load_tools([], config_path=registry)


def script(request: ScriptedRequest) -> ScriptedReply:
    return tool_call_reply("notes_add", a=request.turn, b=1) if request.turn < 3 else text_reply("done")


@pytest.mark.parametrize(
    ("is_remote", "session"), [(True, "trajectory"), (True, "shared"), (False, "shared")]
)
def test_sixty_four_rows_share_one_server(http: HttpServer, is_remote: bool, session: str) -> None:
    where = {"url": http.url} if is_remote else STDIO
    tools = mcp_tools({**where, "prefix": "notes_", "session": session, "tool_selected_list": ["add"]})
    harness = WorkerHarness(script, tools=tools)

    async def main() -> list[Trajectory]:
        trajectories = await harness.worker.run(harness.jobs([{"raw_prompt": user("go")}] * 64))
        harness.assert_nothing_is_left()
        return trajectories

    for trajectory in asyncio.run(main()):
        answers = [m["content"] for m in trajectory.output.messages if m["role"] == "tool"]
        assert answers == ["1", "2", "3"]
        assert trajectory.output.incidents == ()


async def test_a_session_is_reopened_when_an_http_server_restarts(http: HttpServer) -> None:
    lasting, fleeting = mcp_tools({"url": http.url, "session": "shared"}), mcp_tools({"url": http.url})
    shared, own = session_of(*lasting), session_of(*fleeting)
    assert await text_of(shared, "add", a=1, b=1) == "2"
    assert await text_of(own, "add", a=1, b=1) == "2"
    waiting = [asyncio.ensure_future(ask(session, "hang")) for session in (shared, own)]
    await asyncio.sleep(0.2)
    await asyncio.to_thread(http.kill)
    assert [kind_of(await task) for task in waiting] == [IncidentKind.TOOL_UNAVAILABLE] * 2
    assert kind_of(await ask(shared, "add", a=1, b=1)) is IncidentKind.TOOL_UNAVAILABLE
    await asyncio.to_thread(http.start)
    assert await text_of(shared, "add", a=2, b=2) == "4"
    assert kind_of(await ask(own, "add", a=1, b=1)) is IncidentKind.TOOL_UNAVAILABLE
    assert await shared.close() == []
    assert await own.close() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
