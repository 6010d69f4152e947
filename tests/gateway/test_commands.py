"""Processes that do not end as they should."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent_loop.gateway import program_process as module
from agent_loop.gateway.program_process import DRAIN_S, run_command
from tests.gateway.harness import ProgramHarness, in_order, job
from tests.helpers import text_reply

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
        finished = await run_command(python(code), env={}, stdin=b"")
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
    finished = asyncio.run(run_command(python(code), env={}, stdin=b""))
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
        running = asyncio.ensure_future(run_command(python(code), env={}, stdin=b""))
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ends(int((tmp_path / "pid").read_text()))

    asyncio.run(scenario())


def test_a_program_may_ignore_its_input_and_write_more_than_is_kept() -> None:
    code = "import sys; sys.stdout.write('x' * 2**20); sys.stdout.buffer.write(b'\\xff' + b'end')"
    finished = asyncio.run(run_command(python(code), env={}, stdin=b"y" * 2**20))
    assert len(finished.stdout.encode(errors="replace")) < 2**17
    assert finished.stdout.endswith("x\N{REPLACEMENT CHARACTER}end")


def test_the_last_line_is_split_only_at_newlines() -> None:
    said = json.dumps({"reward": 1, "said": "one\u2028two"}, ensure_ascii=False)
    code = f"""
import json, os, sys
from urllib.request import Request, urlopen
body = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": "?"}}]}}).encode()
headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
sys.stdout.buffer.write({said!r}.encode())
"""
    [trajectory] = asyncio.run(ProgramHarness(in_order(text_reply("x"))).run(None, command=python(code)))
    assert trajectory.reward == 1.0
    assert trajectory.output.extra_fields == {"said": "one\u2028two"}


@pytest.mark.parametrize("command", ["python agent.py", [], ["python", 1], 3])
def test_a_command_must_be_a_list_of_strings(command: Any) -> None:
    [trajectory] = asyncio.run(
        ProgramHarness(in_order(text_reply("x"))).worker.run([job(None, command=command)])
    )
    assert "as a list of strings: [python, agent.py]" in trajectory.output.failure.error
