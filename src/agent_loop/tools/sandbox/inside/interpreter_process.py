"""The interpreter's process, seen from its supervisor."""

from __future__ import annotations

import contextlib
import os
import select
import time
import traceback
from typing import NoReturn

from agent_loop.tools.sandbox.inside import linux
from agent_loop.tools.sandbox.inside.files import empty_work_folders, files_exceed
from agent_loop.tools.sandbox.inside.interpreter import become_interpreter
from agent_loop.tools.sandbox.inside.processes import (
    count_threads,
    kill_descendants,
    list_descendants,
    reap,
    resident_bytes,
)
from agent_loop.tools.sandbox.inside.spec import SandboxSpec

WATCH_INTERVAL_S = 0.25
EXIT_TIMEOUT_S = 0.5
POLL_S = 0.005
STANDARD_OUTPUT = 1


class InterpreterProcess:
    """Interpreter process and all its descendants."""

    def __init__(self, spec: SandboxSpec, *, work: str, ruleset: int | None = None) -> None:
        self._spec = spec
        self._work = work
        self._watched_at = 0.0
        self.exit_cause = ""
        """Reason of the termination: `time`, `memory`, `processes`, `files`, `channel`, `exit N` or `signal N`; empty
        while the process runs."""
        requests, self.requests = os.pipe2(os.O_CLOEXEC)
        self.results, results = os.pipe2(os.O_CLOEXEC)
        self.output, output = os.pipe2(os.O_CLOEXEC)
        linux.prctl(
            linux.PR_SET_DUMPABLE, 1
        )  # inherited: the supervisor looks into the interpreter, never the reverse
        self.pid = os.fork()
        if self.pid == 0:
            _run(spec, work=work, ruleset=ruleset, requests=requests, results=results, output=output)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        for fd in (requests, results, output):
            os.close(fd)
        for fd in (self.requests, self.results, self.output):
            os.set_blocking(fd, False)

    def collect_exits(self) -> None:
        """Reap exited processes. If the interpreter is among them, kill its descendants."""
        status = reap().get(self.pid)
        if status is not None and not self.exit_cause:
            code = os.waitstatus_to_exitcode(status)
            self.end(f"exit {code}" if code >= 0 else f"signal {-code}")

    def wait_for_exit(self) -> None:
        """Wait for an interpreter that closed its result pipe. If it does not exit, kill it."""
        give_up = time.monotonic() + EXIT_TIMEOUT_S
        while not self.exit_cause and time.monotonic() < give_up:
            self.collect_exits()
            time.sleep(POLL_S)
        if not self.exit_cause:
            self.end("channel")

    def check_channel(self) -> None:
        """Kill the interpreter if it wrote a result between calls."""
        if not self.exit_cause and select.select([self.results], [], [], 0)[0]:
            self.end("channel")

    def watch(self, *, every_s: float = WATCH_INTERVAL_S) -> None:
        """Kill the interpreter if its processes together exceed a limit. Checks at most once per `every_s` seconds."""
        now = time.monotonic()
        if self.exit_cause or now - self._watched_at < every_s:
            return
        self._watched_at = now
        pids = list_descendants()
        if count_threads(pids) > self._spec.max_processes:
            self.end("processes")
        elif resident_bytes(pids) > self._spec.memory_bytes:
            self.end("memory")
        elif files_exceed(self._spec.temp_dir_bytes, folder=self._work, pids=pids):
            self.end("files")
            empty_work_folders(self._work)

    def end(self, cause: str) -> None:
        """Kill the interpreter and all its descendants."""
        kill_descendants(signals_are_contained=self._spec.signals_are_contained)
        self.exit_cause = cause

    def close(self) -> None:
        """Close the pipes to the interpreter."""
        for fd in (self.requests, self.results, self.output):
            os.close(fd)


def _run(
    spec: SandboxSpec, *, work: str, ruleset: int | None, requests: int, results: int, output: int
) -> NoReturn:
    try:
        become_interpreter(
            spec, work=work, ruleset=ruleset, requests=requests, results=results, output=output
        )
    except BaseException:  # noqa: BLE001  (the child must not continue as a second supervisor)
        for fd in (output, STANDARD_OUTPUT):  # the output may already have been moved to standard output
            with contextlib.suppress(OSError):
                os.write(fd, traceback.format_exc(limit=-1).encode())
    finally:
        os._exit(1)
