"""Choice of the isolation, and cleanup when a process dies."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.tools.python import PythonTool
from agent_loop.tools.sandbox import host as host_module
from agent_loop.tools.sandbox.host import SandboxHost
from agent_loop.tools.sandbox.inside.execution import Output
from agent_loop.tools.sandbox.probe import CAPABILITIES, Isolation, judge
from agent_loop.tools.sandbox.sandbox import open_sandbox
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
    mechanism="landlock",
    files=True,
    network=True,
    processes=True,
    privileges=True,
    limits=True,
    own_user=True,
    system_calls=True,
)


def choose(monkeypatch: pytest.MonkeyPatch, found: Isolation | SandboxError, **settings: Any) -> Isolation:
    """Return the isolation that is chosen if every mechanism isolates as given, or fails."""

    def measure(settings: SandboxSettings, *, mechanism: Mechanism) -> Isolation:
        if isinstance(found, SandboxError):
            raise found
        return replace(found, mechanism=mechanism)

    monkeypatch.setattr(host_module, "measure_isolation", measure)
    return SandboxHost(SandboxSettings(**settings)).isolation


def test_the_isolation_in_use_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        choose(monkeypatch, WHOLE)
    (line,) = caplog.messages
    assert line.startswith("sandboxes: landlock: files of the host out of reach; no network; ")


@pytest.mark.parametrize("lacking", ["files", "network", "processes", "privileges", "limits"])
def test_each_property_of_the_minimum_is_required(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    found = replace(WHOLE, **{lacking: False})
    message = r"(?s)cannot be isolated on this machine.*not in force.*allow_weaker_isolation"
    with pytest.raises(ConfigError, match=message):
        choose(monkeypatch, found)
    assert choose(monkeypatch, found, allow_weaker_isolation=True).mechanism == "landlock"


@pytest.mark.parametrize("lacking", ["own_user", "system_calls"])
def test_properties_beyond_the_minimum_are_reported_but_not_required(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    assert "(not in force: " in str(choose(monkeypatch, replace(WHOLE, **{lacking: False})))


def test_the_reason_of_a_mechanism_that_fails_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s)landlock: forbidden\n.*limits: forbidden"):
        choose(monkeypatch, SandboxError("forbidden"), allow_weaker_isolation=True)


def test_a_failed_start_of_a_sandbox_is_retried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(monkeypatch, WHOLE)
    host = SandboxHost(SandboxSettings(python="/no/such/python"))
    with pytest.raises(SandboxError, match="/no/such/python could not be started"):
        asyncio.run(host.open())
    assert "retrying once" in caplog.text


def test_output_of_a_python_that_cannot_run_the_sandbox_is_shown(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'too old' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SandboxError, match="or newer: too old"):
        asyncio.run(open_sandbox(SandboxSettings(python=str(python)), mechanism="limits"))


FACTS: dict[str, Any] = {
    "reads": False,
    "writes": False,
    "reaches_tcp": False,
    "reaches_unix": False,
    "signals": False,
    "looks_into": False,
    "makes_hidden_memory": False,
    "limits": [1, 1, 1, 1],
}
STATUS = {"Uid": f"{os.geteuid() + 1} 1 1 1", "NoNewPrivs": "1"} | dict.fromkeys(CAPABILITIES, "0" * 16)


def judged(
    facts: Mapping[str, Any] = FACTS,
    status: Mapping[str, str] = STATUS,
    mechanism: Mechanism = "landlock",
) -> Isolation:
    return judge(facts, status=status, settings=SandboxSettings(), mechanism=mechanism)


@pytest.mark.parametrize(
    ("facts", "lacking"),
    [
        ({}, []),
        ({"reads": True}, ["files"]),
        ({"writes": True}, ["files"]),
        ({"reaches_tcp": True}, ["network"]),
        ({"reaches_unix": True}, ["network"]),
        ({"signals": True}, ["processes"]),
        ({"looks_into": True}, ["processes"]),
        ({"makes_hidden_memory": True}, ["system_calls"]),
        ({"limits": [-1, 1, 1, 1]}, ["limits"]),
        ({"limits": [1, 2**40, 1, 1]}, ["limits"]),
    ],
)
def test_each_property_depends_on_the_result_of_its_attempt(
    facts: dict[str, Any], lacking: list[str]
) -> None:
    assert judged(FACTS | facts) == replace(WHOLE, **dict.fromkeys(lacking, False))


def test_limits_alone_never_count_as_isolation() -> None:
    found = judged(mechanism="limits")
    assert [found.files, found.network, found.processes] == [False, False, False]


@pytest.mark.parametrize("status", [{"NoNewPrivs": "0"}, {"CapEff": "0000000000000001"}])
def test_privileges_of_any_kind_are_reported(status: dict[str, str]) -> None:
    assert judged(status=STATUS | status) == replace(WHOLE, privileges=False)


def test_the_process_limit_does_not_count_for_root() -> None:
    assert not judged(status=STATUS | {"Uid": "0 0 0 0"}).limits


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


def test_sandboxes_start_with_a_restrictive_umask() -> None:
    python_tool()
    before = os.umask(0o077)
    try:
        PythonTool(SMALL)
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, whose own Python may be private")
def test_root_uses_the_system_python_if_other_users_cannot_reach_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert SandboxSettings().resolve_python() == readable_python()
    tmp_path.chmod(0o700)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert SandboxSettings().resolve_python() == "/usr/bin/python3"
    assert SandboxSettings(python="/opt/python").resolve_python() == "/opt/python"


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


@pytest.mark.parametrize("mechanism", ["landlock", "limits"])
def test_an_agent_killed_by_sigkill_leaves_no_processes_and_no_files(mechanism: Mechanism) -> None:
    config = {"mechanism": mechanism, "allow_weaker_isolation": True, "python": readable_python()}
    python_tool(**config)
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


def test_a_sandbox_whose_supervisor_dies_is_replaced_at_the_next_call() -> None:
    before = descendants()
    tool = python_tool()

    async def main() -> tuple[Answer, Answer]:
        await tool.create("i")
        for pid in descendants() - before:
            os.kill(pid, signal.SIGKILL)
        lost = await ask(tool, "i", "1 + 1")
        again = await ask(tool, "i", "1 + 1")
        await tool.release("i")
        return lost, again

    lost, again = asyncio.run(main())
    assert lost.text.startswith("The sandbox failed: ")
    assert lost.text.endswith("All variables and files are lost.")
    assert again.text.endswith("was restarted: variables and files are lost.\n2")
    assert left_running(before) == set()


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
