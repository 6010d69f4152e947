"""Choice of the isolation backend, and cleanup when a process dies."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.tools.python import PythonTool
from agent_loop.tools.sandbox.backend import SandboxBackend
from agent_loop.tools.sandbox.channel import Channel
from agent_loop.tools.sandbox.host import SandboxHost
from agent_loop.tools.sandbox.inside.output import Output
from agent_loop.tools.sandbox.inside.socket_messages import BadMessage, pack
from agent_loop.tools.sandbox.isolation import Isolation
from agent_loop.tools.sandbox.probe import CAPABILITIES, judge
from agent_loop.tools.sandbox.settings import Mechanism, SandboxSettings
from tests.tools.sandboxes import (
    SMALL,
    Answer,
    ask,
    descendants,
    ends,
    left_running,
    python_tool,
    readable_python,
    running,
    talk,
)

WHOLE = Isolation(
    mechanism="namespaces",
    files=True,
    network=True,
    processes=True,
    privileges=True,
    limits=True,
    own_view=True,
    own_user=True,
    system_calls=True,
    own_disk=True,
)


class ScriptedBackend(SandboxBackend):
    """Backend that starts, or fails with a given message."""

    def __init__(self, mechanism: Mechanism, *, fault: str = "") -> None:
        super().__init__(SandboxSettings())
        self.mechanism = mechanism
        self.fault = fault
        self.log: list[str] = []

    def start(self) -> None:
        self.log.append("start")
        if self.fault:
            raise SandboxError(self.fault)

    async def spawn(self, control: socket.socket, *, work: str | None) -> None:
        raise ConnectionResetError("nobody is there")

    def is_alive(self) -> bool:
        return False

    def close(self) -> None:
        self.log.append("close")


def host(*backends: ScriptedBackend, found: Isolation = WHOLE, **settings: Any) -> SandboxHost:
    async def probe(backend: SandboxBackend) -> Isolation:
        return replace(found, mechanism=backend.mechanism)

    return SandboxHost(SandboxSettings(**settings), backends=backends, probe=probe)


def test_the_first_backend_that_isolates_sufficiently_is_used_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, works = ScriptedBackend("namespaces", fault="forbidden"), ScriptedBackend("bubblewrap")
    with caplog.at_level("INFO"):
        taken = host(broken, works)
    assert taken.isolation.mechanism == "bubblewrap"
    assert broken.log == ["start", "close"]
    (line,) = caplog.messages
    assert line.startswith("sandboxes: bubblewrap: files of the host out of reach; no network; ")
    taken.close()
    assert works.log == ["start", "close"]


@pytest.mark.parametrize("lacking", ["files", "network", "processes", "privileges", "limits"])
def test_each_property_of_the_minimum_is_required(lacking: str) -> None:
    backend = ScriptedBackend("namespaces")
    with pytest.raises(
        ConfigError, match=r"(?s)cannot be isolated on this machine.*not in force.*allow_weaker_isolation"
    ):
        host(backend, found=replace(WHOLE, **{lacking: False}))
    assert backend.log == ["start", "close"]


@pytest.mark.parametrize("lacking", ["own_view", "own_user", "system_calls", "own_disk"])
def test_properties_beyond_the_minimum_are_reported_but_not_required(lacking: str) -> None:
    taken = host(ScriptedBackend("namespaces"), found=replace(WHOLE, **{lacking: False}))
    assert "(not in force: " in str(taken.isolation)


def test_weaker_isolation_is_used_if_the_settings_allow_it() -> None:
    taken = host(
        ScriptedBackend("namespaces", fault="forbidden"),
        ScriptedBackend("limits"),
        found=replace(WHOLE, files=False, network=False),
        allow_weaker_isolation=True,
    )
    assert str(taken.isolation).endswith("(not in force: files of the host out of reach; no network)")


def test_every_backend_that_failed_is_listed_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"(?s)namespaces: no unshare\n.*bubblewrap: not installed"):
        host(
            ScriptedBackend("namespaces", fault="no unshare"),
            ScriptedBackend("bubblewrap", fault="not installed"),
            allow_weaker_isolation=True,
        )


def test_a_failed_start_of_a_sandbox_is_retried_once() -> None:
    backend = ScriptedBackend("namespaces")
    taken = host(backend)
    with pytest.raises(SandboxError, match="nobody is there"):
        asyncio.run(taken.open())
    assert backend.log == ["start", "start"]


OUTSIDE = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")}
FACTS: dict[str, Any] = {
    "reads": False,
    "writes": False,
    "reaches_tcp": False,
    "reaches_unix": False,
    "signals": False,
    "looks_into": False,
    "makes_hidden_memory": False,
    "namespaces": dict.fromkeys(OUTSIDE, "other"),
    "writable_bytes": 1,
    "limits": [1, 1, 1, 1],
}
STATUS = {"Uid": f"{os.geteuid() + 1} 1 1 1", "NoNewPrivs": "1"} | dict.fromkeys(CAPABILITIES, "0" * 16)


@pytest.mark.parametrize(
    ("facts", "lacking"),
    [
        ({}, []),
        ({"reads": True}, ["files"]),
        ({"writes": True}, ["files"]),
        ({"reaches_tcp": True}, ["network"]),
        ({"reaches_unix": True}, ["network"]),
        ({"namespaces": FACTS["namespaces"] | {"mnt": OUTSIDE["mnt"]}}, ["files", "own_view"]),
        ({"namespaces": FACTS["namespaces"] | {"pid": OUTSIDE["pid"]}}, ["processes", "own_view"]),
        ({"namespaces": FACTS["namespaces"] | {"net": OUTSIDE["net"]}}, ["network"]),
        ({"makes_hidden_memory": True}, ["system_calls"]),
        ({"writable_bytes": 2**50}, ["own_disk"]),
        ({"limits": [-1, 1, 1, 1]}, ["limits"]),
        ({"limits": [1, 1, 2**40, 1]}, ["limits"]),
    ],
)
def test_each_property_depends_on_the_result_of_its_attempt(
    facts: dict[str, Any], lacking: list[str]
) -> None:
    judged = judge(FACTS | facts, status=STATUS, backend=ScriptedBackend("namespaces"))
    assert judged == replace(WHOLE, **dict.fromkeys(lacking, False))


@pytest.mark.parametrize(
    ("facts", "lacking"),
    [
        ({}, []),
        ({"reads": True}, ["files"]),
        ({"reaches_tcp": True}, ["network"]),
        ({"signals": True}, ["processes"]),
        ({"looks_into": True}, ["processes"]),
    ],
)
def test_landlock_is_judged_without_namespaces(facts: dict[str, Any], lacking: list[str]) -> None:
    found = FACTS | {"namespaces": OUTSIDE} | facts
    judged = judge(found, status=STATUS, backend=ScriptedBackend("landlock"))
    assert judged == replace(WHOLE, mechanism="landlock", own_view=False, **dict.fromkeys(lacking, False))


def test_limits_alone_never_count_as_isolation() -> None:
    judged = judge(FACTS | {"namespaces": OUTSIDE}, status=STATUS, backend=ScriptedBackend("limits"))
    assert [judged.files, judged.network, judged.processes] == [False, False, False]


@pytest.mark.parametrize("status", [{"NoNewPrivs": "0"}, {"CapEff": "0000000000000001"}])
def test_privileges_of_any_kind_are_reported(status: dict[str, str]) -> None:
    judged = judge(FACTS, status=STATUS | status, backend=ScriptedBackend("namespaces"))
    assert judged == replace(WHOLE, privileges=False)


def test_the_process_limit_does_not_count_for_root() -> None:
    status = STATUS | {"Uid": "0 0 0 0"}
    assert not judge(FACTS, status=status, backend=ScriptedBackend("bubblewrap")).limits


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_ends_of_the_output_are_kept_for_any_chunk_size(chunk: int) -> None:
    data = bytes(range(256)) * 4
    output = Output(100)
    for start in range(0, len(data), chunk):
        output.add(data[start : start + chunk])
    assert output.dropped_bytes == len(data) - 100
    expected = f"\n[... {len(data) - 100} bytes of output left out ...]\n"
    assert output.text() == data[:50].decode(errors="replace") + expected + data[-50:].decode(
        errors="replace"
    )


def test_the_documentation_names_every_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")
    assert [name for name in SandboxSettings.model_fields if name not in page] == []


def test_output_within_the_limit_is_complete() -> None:
    output = Output(10)
    output.add("zwölf".encode())
    assert (output.text(), output.dropped_bytes) == ("zwölf", 0)


@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\0\0\5{}", pack({"a": 1})[:-1]])
def test_a_truncated_message_counts_as_a_closed_socket(sent: bytes) -> None:
    assert asyncio.run(receive(sent)) is None


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2{]", b"\0\0\0\1\xff"])
def test_invalid_messages_are_refused(sent: bytes) -> None:
    with pytest.raises(BadMessage):
        asyncio.run(receive(sent))


async def receive(sent: bytes) -> Any:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(sent)
    channel = Channel(ours)
    try:
        return await channel.receive()
    finally:
        channel.close()


@pytest.mark.parametrize("mechanism", ["namespaces", "landlock"])
def test_sandboxes_start_with_a_restrictive_umask(mechanism: Mechanism) -> None:
    python_tool(mechanism=mechanism)
    before = os.umask(0o077)
    try:
        tool = PythonTool(SMALL | {"mechanism": mechanism})
    finally:
        os.umask(before)
    tool.close()


def test_a_missing_folder_for_temporary_files_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    python_tool(mechanism="landlock")
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ConfigError, match="/no/such/folder"):
        PythonTool(SMALL | {"mechanism": "landlock"})


AGENT = """
import asyncio, sys
from agent_loop.tools.python import PythonTool

async def main():
    tool = PythonTool({config!r})
    await tool.create("i")
    await tool.execute("i", {{"code": {code!r}}})
    print("ready", flush=True)
    await tool.execute("i", {{"code": "while True: pass"}})

asyncio.run(main())
"""
LEAVES_A_DAEMON = """
import os, subprocess
subprocess.Popen(['sleep', '{marker}'], start_new_session=True)
open('file', 'w').close()
"""


@pytest.mark.parametrize("mechanism", ["namespaces", "bubblewrap", "landlock", "limits"])
def test_an_agent_killed_by_sigkill_leaves_no_processes_and_no_files(mechanism: Mechanism) -> None:
    config = {"mechanism": mechanism, "allow_weaker_isolation": True, "python": readable_python()}
    start_or_skip(config)
    marker = f"{os.getpid()}0{len(mechanism)}.5"
    script = AGENT.format(config=config, code=LEAVES_A_DAEMON.format(marker=marker))
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        agent = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": folder}
        )
        with agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"ready\n"
            assert running(marker)
            started = descendants(agent.pid) - {agent.pid}
            agent.kill()
        assert [pid for pid in started if not ends(pid)] == []
        assert running(marker) == []
        assert os.listdir(folder) == []


def start_or_skip(config: dict[str, Any]) -> PythonTool:
    if config["mechanism"] == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("NO BUBBLEWRAP HERE: bwrap is not installed")
    return python_tool(**config)


def test_sandboxes_end_with_a_dead_fork_server_which_is_restarted() -> None:
    before = descendants()
    tool = start_or_skip({"mechanism": "namespaces", "time_limit_s": 18.0})
    server = descendants() - before

    async def main() -> tuple[Answer, Answer]:
        await tool.create("i")
        for pid in server:
            os.kill(pid, signal.SIGKILL)
        lost = await ask(tool, "i", "1 + 1")
        again = await ask(tool, "i", "1 + 1")
        await tool.release("i")
        return lost, again

    lost, again = asyncio.run(main())
    assert lost.text.startswith("The sandbox failed: ")
    assert lost.text.endswith("All variables and files are lost.")
    assert again.text.endswith("was restarted: variables and files are lost.\n2")
    tool.close()
    assert left_running(before) == set()


def test_bubblewrap_isolates_too() -> None:
    start_or_skip({"mechanism": "bubblewrap"})
    codes = [
        "open('/etc/shadow')",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "open('/x', 'w')",
        "1",
    ]
    *escapes, last = talk(*codes, mechanism="bubblewrap")
    assert all(answer.is_error for answer in escapes)
    assert last.text == "1"


def test_without_isolation_limits_hold_and_daemons_end(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"mechanism": "limits", "allow_weaker_isolation": True, "python": readable_python()}
    marker = f"{os.getpid()}1.5"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        started, bomb, after = talk(
            LEAVES_A_DAEMON.format(marker=marker), "bytearray(2**40)", "1", **settings
        )
        assert os.listdir(folder) == []
    assert not started.is_error
    assert bomb.text.endswith("MemoryError")
    assert after.text == "1"
    assert running(marker) == []
