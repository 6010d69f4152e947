"""The interpreter's process, as its supervisor holds it."""

from __future__ import annotations

import contextlib
import os
import select
import time
import traceback
from typing import NoReturn

from agent_loop.tools.sandbox.inside import linux
from agent_loop.tools.sandbox.inside.files import empty_work_folders, exceeds
from agent_loop.tools.sandbox.inside.interpreter import become_interpreter
from agent_loop.tools.sandbox.inside.plan import Plan
from agent_loop.tools.sandbox.inside.processes import (
    count_threads,
    end_processes,
    own_processes,
    reap,
    resident_bytes,
)

WATCH_INTERVAL_S = 0.25
EXIT_PATIENCE_S = 0.5
POLL_S = 0.005
STANDARD_OUTPUT = 1


class Child:
    """One interpreter and all that it started.

    Args:
        plan: Its limits.
        work: The folder that it may write to.
        ruleset: Landlock's, which shuts it in; None where something else does.
    """

    def __init__(self, plan: Plan, *, work: str, ruleset: int | None = None) -> None:
        self._plan = plan
        self._work = work
        self._watched_at = 0.0
        self.end_cause = ""
        """Why it is gone: `time`, `memory`, `processes`, `files`, `channel`, `exit N` or `signal N`; empty while it is
        there."""
        requests, self.requests = os.pipe2(os.O_CLOEXEC)
        self.results, results = os.pipe2(os.O_CLOEXEC)
        self.output, output = os.pipe2(os.O_CLOEXEC)
        linux.prctl(
            linux.PR_SET_DUMPABLE, 1
        )  # inherited: the supervisor looks into the interpreter, never the reverse
        self.pid = os.fork()
        if self.pid == 0:
            _run(plan, work=work, ruleset=ruleset, requests=requests, results=results, output=output)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        for fd in (requests, results, output):
            os.close(fd)
        for fd in (self.requests, self.results, self.output):
            os.set_blocking(fd, False)

    def note_end(self) -> None:
        """Collects processes that ended; if the interpreter is among them, what it started is ended too."""
        status = reap().get(self.pid)
        if status is not None and not self.end_cause:
            code = os.waitstatus_to_exitcode(status)
            self.end(f"exit {code}" if code >= 0 else f"signal {-code}")

    def wait_for_end(self) -> None:
        """As `note_end`, for an interpreter that is about to end; one that does not has damaged its channel."""
        give_up = time.monotonic() + EXIT_PATIENCE_S
        while not self.end_cause and time.monotonic() < give_up:
            self.note_end()
            time.sleep(POLL_S)
        if not self.end_cause:
            self.end("channel")

    def check_channel(self) -> None:
        """Between calls the interpreter has nothing to say; one that says something is ended."""
        if not self.end_cause and select.select([self.results], [], [], 0)[0]:
            self.end("channel")

    def watch(self, *, every_s: float = WATCH_INTERVAL_S) -> None:
        """Ends the interpreter if all its processes together exceed a limit; looks no more often than `every_s`."""
        now = time.monotonic()
        if self.end_cause or now - self._watched_at < every_s:
            return
        self._watched_at = now
        pids = own_processes()
        if count_threads(pids) > self._plan.max_processes:
            self.end("processes")
        elif resident_bytes(pids) > self._plan.memory_bytes:
            self.end("memory")
        elif not self._plan.namespaces and exceeds(self._plan.temp_dir_bytes, folder=self._work, pids=pids):
            self.end("files")
            empty_work_folders(self._work)

    def end(self, cause: str) -> None:
        """Kills the interpreter and all that it started."""
        end_processes(reaches_own_alone=self._plan.reaches_own_alone)
        self.end_cause = cause

    def close(self) -> None:
        """Closes the pipes to it."""
        for fd in (self.requests, self.results, self.output):
            os.close(fd)


def _run(plan: Plan, *, work: str, ruleset: int | None, requests: int, results: int, output: int) -> NoReturn:
    try:
        become_interpreter(
            plan, work=work, ruleset=ruleset, requests=requests, results=results, output=output
        )
    except BaseException:  # noqa: BLE001  (the child must not go on as a second supervisor)
        for fd in (output, STANDARD_OUTPUT):  # the second, once the first has moved there
            with contextlib.suppress(OSError):
                os.write(fd, traceback.format_exc(limit=-1).encode())
    finally:
        os._exit(1)
