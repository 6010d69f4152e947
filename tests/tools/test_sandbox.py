"""Measurement of the isolation, and cleanup when a process dies."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.tools.python import PythonTool
from agent_loop.tools.sandbox.inside import landlock
from agent_loop.tools.sandbox.inside.supervisor import Output
from agent_loop.tools.sandbox.probe import find_escapes
from agent_loop.tools.sandbox.sandbox import open_sandbox
from agent_loop.tools.sandbox.settings import SandboxSettings
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


def test_escapes_are_found_where_the_kernel_does_not_isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    python_tool()
    assert asyncio.run(find_escapes(SandboxSettings(python=readable_python()))) == []
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(ConfigError, match="it has no Landlock"):
        PythonTool(SMALL)
    weak = SandboxSettings(python=readable_python(), allow_weaker_isolation=True)
    found = asyncio.run(find_escapes(weak))
    assert "reads files of the host" in found
    assert "inspects processes of the host" in found
    assert "has no limits" not in found


def test_output_of_a_python_that_cannot_run_the_sandbox_is_shown(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'too old' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SandboxError, match="or newer: too old"):
        asyncio.run(open_sandbox(SandboxSettings(python=str(python))))


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
    python_tool()
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ConfigError, match="/no/such/folder"):
        PythonTool(SMALL)


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


def test_an_agent_killed_by_sigkill_leaves_no_processes_and_no_files() -> None:
    config = {"python": readable_python()}
    python_tool(**config)
    marker = f"{os.getpid()}0.5"
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
    monkeypatch.setattr(landlock, "version", lambda: 0)
    settings = {"allow_weaker_isolation": True, "python": readable_python()}
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
