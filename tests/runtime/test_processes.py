"""Child processes that do not end as they should, owners of resources, and processes that outlive them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError
from agent_loop.runtime import child_process as module
from agent_loop.runtime import owner as owners
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


def leaving_a_child(folder: Path, *, apart: bool = False, then: str = "") -> list[str]:
    return python(LEAVES_A_CHILD.format(apart=apart, pids=str(folder / "pid")) + then)


def child_of(folder: Path) -> int:
    return int((folder / "pid").read_text())


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


async def test_a_program_ends_when_it_exits_and_its_children_are_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    finished = await run_command(leaving_a_child(tmp_path), env=ENV, stdin=b"")
    assert (finished.exit_code, finished.stdout) == (0, "done\n")
    assert ends(child_of(tmp_path))
    assert time.monotonic() - began < 30


async def test_output_held_open_is_read_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DRAIN_S < 30
    monkeypatch.setattr(module, "DRAIN_S", 0.1)
    began = time.monotonic()
    finished = await run_command(leaving_a_child(tmp_path, apart=True), env=ENV, stdin=b"")
    os.kill(child_of(tmp_path), signal.SIGKILL)
    assert finished.stdout == "done\n"
    assert time.monotonic() - began < 30


async def test_cancelling_at_exit_leaves_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exited(watch: Any) -> None:
        exits(watch)
        running.cancel()

    exits = module.OutputCollector.process_exited
    monkeypatch.setattr(module.OutputCollector, "process_exited", exited)
    running = asyncio.ensure_future(run_command(leaving_a_child(tmp_path), env=ENV, stdin=b""))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ends(child_of(tmp_path))


async def test_a_program_may_ignore_its_input_and_write_more_than_is_kept() -> None:
    code = "import sys; sys.stdout.write('x' * 2**20); sys.stdout.buffer.write(b'\\xff' + b'end')"
    finished = await run_command(python(code), env=ENV, stdin=b"y" * 2**20)
    assert len(finished.stdout.encode(errors="replace")) < 2**17
    assert finished.stdout.endswith("x\N{REPLACEMENT CHARACTER}end")
    assert finished.omitted_bytes == 2**20 + 4 - MAX_KEPT_BYTES


async def test_a_program_that_exceeds_its_time_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    command = leaving_a_child(tmp_path, then="\nimport time; time.sleep(60)")
    result = await run_command(command, env=ENV, stdin=b"", timeout_s=3)
    assert result.timed_out
    assert result.exit_code == -signal.SIGTERM
    assert result.stdout == "done\n"
    assert ends(child_of(tmp_path))


def test_input_comes_from_a_file_and_output_goes_to_a_sink(tmp_path: Path) -> None:
    path, received = tmp_path / "input", list[bytes]()
    path.write_bytes(os.urandom(2**20))
    with path.open("rb") as file:
        result = asyncio.run(run_command(["cat"], env=ENV, stdin=file, stdout_sink=received.append))
    assert (result.exit_code, result.stdout, result.omitted_bytes) == (0, "", 0)
    assert b"".join(received) == path.read_bytes()


def test_a_program_gets_the_given_folder_and_environment(
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


async def test_a_command_that_cannot_be_started_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-program.*cannot be started"):
        await run_command(["no-such-program"], env=ENV)


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], owners.OWNER_VARIABLE: mark})


def dead_token() -> str:
    """Return the token of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return replace(owners.this_process(), pid=ended.pid).token


def test_a_token_begins_names_and_is_read_from_them() -> None:
    this = owners.this_process()
    assert owners.parse_owner(f"{this.token}.a1b2") == this
    assert owners.parse_owner("container") is None
    assert not this.is_dead


def test_an_owner_is_dead_once_it_has_ended_or_its_id_belongs_to_another_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        owner = replace(owners.this_process(), pid=child.pid, start=start_of(child.pid))
        assert not owner.is_dead
        assert replace(owner, start=owner.start - 1).is_dead
        child.kill()
    assert owner.is_dead


def test_owners_of_other_machines_and_boots_may_live() -> None:
    dead = replace(owners.this_process(), pid=2**22 + 1)
    assert dead.is_dead
    assert not replace(dead, machine="00000000").is_dead
    assert not replace(dead, boot="00000000").is_dead


def test_marked_processes_are_killed_and_others_are_not() -> None:
    mark = f"{owners.this_process().token}.meant"
    meant, other = sleeper(mark), sleeper(f"{owners.this_process().token}.other")
    try:
        assert owners.kill_processes(lambda owner: owner == mark) == 1
        assert meant.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_orphans_are_killed_except_those_that_end_by_themselves() -> None:
    token = dead_token()
    orphan, spared, owned = (
        sleeper(f"{token}.x"),
        sleeper(token + owners.SPARED_SUFFIX),
        sleeper(owners.this_process().token),
    )
    try:
        owners.kill_orphans()
        assert orphan.wait(10) == -signal.SIGKILL
        assert (spared.poll(), owned.poll()) == (None, None)
        assert owners.num_spared_orphans() >= 1
    finally:
        for process in (spared, owned):
            process.kill()
            process.wait()


def start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
