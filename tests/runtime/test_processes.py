"""Child processes that do not end as they should, and the environment that they get."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError
from agent_loop.runtime import child_process as module
from agent_loop.runtime.child_process import DRAIN_S, MAX_KEPT_BYTES, inherited_environment, run_command

ENV = inherited_environment()

LEAVES_A_CHILD = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session={apart})
pathlib.Path({pids!r}).write_text(str(child.pid))
print("done", flush=True)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def ends(pid: int) -> bool:
    """Return whether a process ends within some seconds."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 10)[0])
    finally:
        os.close(process)


def test_a_program_ends_when_it_exits_and_its_children_are_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        code = LEAVES_A_CHILD.format(apart=False, pids=str(tmp_path / "pid"))
        finished = await run_command(python(code), env=ENV, stdin=b"")
        assert (finished.exit_code, finished.stdout) == (0, "done\n")
        assert ends(int((tmp_path / "pid").read_text()))

    began = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - began < 30


def test_an_output_that_a_daemon_holds_open_is_read_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DRAIN_S < 30
    monkeypatch.setattr(module, "DRAIN_S", 0.1)
    code = LEAVES_A_CHILD.format(apart=True, pids=str(tmp_path / "pid"))
    began = time.monotonic()
    finished = asyncio.run(run_command(python(code), env=ENV, stdin=b""))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert finished.stdout == "done\n"
    assert time.monotonic() - began < 30


def test_a_caller_that_is_cancelled_as_the_program_exits_leaves_no_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        def exited(watch: Any) -> None:
            exits(watch)
            running.cancel()

        exits = module.OutputCollector.process_exited
        monkeypatch.setattr(module.OutputCollector, "process_exited", exited)
        code = LEAVES_A_CHILD.format(apart=False, pids=str(tmp_path / "pid"))
        running = asyncio.ensure_future(run_command(python(code), env=ENV, stdin=b""))
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ends(int((tmp_path / "pid").read_text()))

    asyncio.run(scenario())


def test_a_program_may_ignore_its_input_and_write_more_than_is_kept() -> None:
    code = "import sys; sys.stdout.write('x' * 2**20); sys.stdout.buffer.write(b'\\xff' + b'end')"
    finished = asyncio.run(run_command(python(code), env=ENV, stdin=b"y" * 2**20))
    assert len(finished.stdout.encode(errors="replace")) < 2**17
    assert finished.stdout.endswith("x\N{REPLACEMENT CHARACTER}end")
    assert finished.omitted_bytes == 2**20 + 4 - MAX_KEPT_BYTES


def test_a_program_that_exceeds_its_time_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    code = LEAVES_A_CHILD.format(apart=False, pids=str(tmp_path / "pid")) + "\nimport time; time.sleep(60)"

    async def scenario() -> None:
        result = await run_command(python(code), env=ENV, stdin=b"", timeout_s=3)
        assert result.timed_out
        assert result.exit_code == -signal.SIGTERM
        assert result.stdout == "done\n"
        assert ends(int((tmp_path / "pid").read_text()))

    asyncio.run(scenario())


def test_input_comes_from_a_file_and_output_goes_to_a_sink(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(os.urandom(2**20))
    received: list[bytes] = []

    async def scenario() -> None:
        with (tmp_path / "input").open("rb") as file:
            result = await run_command(["cat"], env=ENV, stdin=file, stdout_sink=received.append)
        assert (result.exit_code, result.stdout, result.omitted_bytes) == (0, "", 0)

    asyncio.run(scenario())
    assert b"".join(received) == (tmp_path / "input").read_bytes()


def test_a_program_runs_in_the_given_folder_with_the_given_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("OPENAI_API_KEY", "hidden")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert inherited_environment()["LC_ALL"] == "C.UTF-8"
    code = "import os; print(os.getcwd()); print(dict(os.environ))"
    env = {**inherited_environment(), "GIVEN": "1"}
    result = asyncio.run(run_command(python(code), env=env, cwd=tmp_path))
    folder, variables = result.stdout.splitlines()
    assert folder == str(tmp_path)
    assert "hidden" not in variables
    assert "'GIVEN': '1'" in variables


def test_a_command_that_cannot_be_started_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-program.*cannot be started"):
        asyncio.run(run_command(["no-such-program"], env=ENV))
