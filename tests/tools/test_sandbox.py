"""Measurement of the isolation, cleanup when a process dies, and the filter of system calls."""

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.tools.python import PythonTool
from agent_loop.tools.sandbox.inside import landlock, seccomp
from agent_loop.tools.sandbox.inside.seccomp import ABSENT, ARCHITECTURES, OF_OWNERS, RULES, Numbers
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


REFUSED_CALLS = seccomp.REFUSED | OF_OWNERS
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
CLONE, CLONE3, SOCKET, SOCKETPAIR, OPENAT = (56, 220), (435, 435), (41, 198), (53, 199), (257, 56)


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Return the decision of a machine's filter on a system call, by running its program by hand."""
    lines = seccomp.make_program(machine, refused=REFUSED_CALLS, rules=RULES)
    architecture = ARCHITECTURES[machine][0] if architecture is None else architecture
    data = {seccomp.NUMBER_OFFSET: number, seccomp.ARCHITECTURE_OFFSET: architecture}
    for place in range(6):
        data[seccomp.ARGUMENTS_OFFSET + 8 * place] = arguments[place] if place < len(arguments) else 0
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == seccomp.LOAD:
            loaded = data[operand]
        elif code == seccomp.AND:
            loaded &= operand
        elif code == seccomp.JUMP_EQUAL:
            at += if_true if loaded == operand else if_false
        elif code == seccomp.JUMP_AT_LEAST:
            at += if_true if loaded >= operand else if_false
        else:
            return operand


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_refused_system_calls_fail_and_others_are_allowed(machine: str) -> None:
    column = ARCHITECTURES[machine][1]
    refused = {numbers[column] for numbers in REFUSED_CALLS.values()} - {ABSENT}
    ruled = {rule.numbers[column] for rule in RULES}
    for number in range(600):
        said = verdict(machine, number)
        if number in refused:
            assert said == seccomp.ERRNO | errno.EPERM
        elif number not in ruled:
            assert said == seccomp.ALLOW


@pytest.mark.parametrize("number", [0, 1, 62, 0x40000000, 0x40000000 + 101, ABSENT])
def test_system_calls_of_another_architecture_kill_the_process(machine: str, number: int) -> None:
    i386 = 0x40000003
    assert verdict(machine, number, architecture=i386) == seccomp.KILL
    if number >= seccomp.X32_BIT:
        assert verdict(machine, number) == seccomp.KILL


@pytest.mark.parametrize(
    ("numbers", "arguments", "error"),
    [
        (CLONE, (0x00010F00,), 0),  # a thread
        (CLONE, (17,), 0),  # a process
        (CLONE, (0x10000000 | 17,), errno.EPERM),
        (CLONE, (0x40000000 | 17,), errno.EPERM),
        (CLONE3, (), errno.ENOSYS),
        (SOCKET, (socket.AF_UNIX,), errno.ENETUNREACH),
        (SOCKET, (socket.AF_INET,), errno.ENETUNREACH),
        (SOCKETPAIR, (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), 0),
        (SOCKETPAIR, (socket.AF_UNIX, socket.SOCK_DGRAM), errno.ENETUNREACH),
        (SOCKETPAIR, (socket.AF_INET, socket.SOCK_STREAM), errno.ENETUNREACH),
        (OPENAT, (0, 0, 0o100), 0),
        (OPENAT, (0, 0, 0o1 | 0o100 | 0o1000), 0),
        (OPENAT, (0, 0, 0o1000), errno.EPERM),
        ((302, 261), (0,), 0),
        ((302, 261), (1,), errno.EPERM),
        ((141, 140), (0, 0, 5), 0),
        ((141, 140), (2, 0, 5), errno.EPERM),
        ((141, 140), (0, 1, 5), errno.EPERM),
    ],
)
def test_rules_depend_on_the_arguments(
    machine: str, numbers: Numbers, arguments: tuple[int, ...], error: int
) -> None:
    number = numbers[ARCHITECTURES[machine][1]]
    assert verdict(machine, number, *arguments) == (seccomp.ERRNO | error if error else seccomp.ALLOW)


def test_the_numbers_match_the_kernel_headers(machine: str) -> None:
    header, column = HEADERS[machine], ARCHITECTURES[machine][1]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", header.read_text(), re.MULTILINE))
    ours = {
        name: str(numbers[column]) for name, numbers in REFUSED_CALLS.items() if numbers[column] != ABSENT
    }
    assert {name: known[name] for name in ours if name in known} == {
        name: number for name, number in ours.items() if name in known
    }
    assert len(known.keys() & ours.keys()) > 50
