"""First process of a sandbox: it starts the interpreter, sends it calls and enforces its limits.

The supervisor consumes calls from the control socket. It waits for the interpreter, the time limit and the other
limits, and produces one result per call. When the other end of the control socket closes, it kills everything in the
sandbox and returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent_loop.tools.sandbox.inside import linux
from agent_loop.tools.sandbox.inside.files import empty_work_folders, files_exceed
from agent_loop.tools.sandbox.inside.interpreter import (
    DONE,
    FAILED,
    INTERRUPTED,
    LENGTH_BYTES,
    NONCE_BYTES,
    become_interpreter,
)
from agent_loop.tools.sandbox.inside.processes import (
    count_threads,
    kill_descendants,
    list_descendants,
    reap,
    resident_bytes,
)
from agent_loop.tools.sandbox.inside.spec import MEGABYTE, SandboxSpec

WATCH_INTERVAL_S = 0.25
EXIT_TIMEOUT_S = 0.5
POLL_S = 0.005
STANDARD_OUTPUT = 1
WAKEUP_BYTES = 4096
CHUNK_BYTES = 2**16
LAST_CHUNKS = 32
"""Maximum number of chunks read after the verdict, since a remaining process could write without end."""
VERDICTS = {DONE: "done", FAILED: "failed", INTERRUPTED: "interrupted"}


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """Result of one call."""

    ending: str
    """`done`; `failed`: the code raised; `interrupted`: at the time limit, with the state kept; `lost`: the interpreter
    terminated and the state is lost."""
    exit_cause: str
    """Why the interpreter terminated, or empty; see `InterpreterProcess`."""
    output: str
    dropped_bytes: int
    seconds: float
    restarted: str
    """Why the interpreter terminated after the previous call, so that this call ran in a new one; empty otherwise."""


def send(control: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message to the agent: a line of JSON."""
    control.sendall(json.dumps(message).encode() + b"\n")


class Supervisor:
    """Supervisor of the interpreter of one sandbox."""

    def __init__(
        self, control: socket.socket, *, spec: SandboxSpec, work: str, ruleset: int | None = None
    ) -> None:
        self._control = control
        self._requests = control.makefile("rb")
        self._spec = spec
        self._work = work
        self._ruleset = ruleset
        self._child: InterpreterProcess | None = None
        self._woken, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve calls until the other end of the control socket closes."""
        while self._wait_for_call() and (request := self._requests.readline()).endswith(b"\n"):
            result = self._execute(str(json.loads(request)["code"]))
            if result is None:
                break
            send(self._control, asdict(result))
        kill_descendants(signals_are_contained=self._spec.signals_are_contained)

    def _wait_for_call(self) -> bool:
        """Wait for data from the agent, and check the limits of processes that still run."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                is_quiet = self._child is None or count_threads(list_descendants()) <= 1
                ready = {key.fileobj for key, _ in selector.select(None if is_quiet else WATCH_INTERVAL_S)}
                if self._control in ready:
                    return True
                self._check_child(has_signal=self._woken in ready)

    def _execute(self, code: str) -> ExecutionResult | None:
        """Run one call. Return None if the agent closed its socket during the call."""
        child, restarted = self._prepare_child()
        call = CodeExecution(child, code, spec=self._spec)
        started = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            call.register(selector)
            while not call.verdict and not child.exit_cause:
                ready = call.handle(selector)
                if self._control in ready:
                    return None
                if not call.verdict:
                    self._check_child(has_signal=self._woken in ready)
                    call.check_clock()
        call.read_rest()
        if child.exit_cause:
            self._drop_child()
        return ExecutionResult(
            ending="lost" if child.exit_cause else call.verdict,
            exit_cause=child.exit_cause,
            output=call.output.text(),
            dropped_bytes=call.output.dropped_bytes,
            seconds=time.monotonic() - started,
            restarted=restarted,
        )

    def _prepare_child(self) -> tuple[InterpreterProcess, str]:
        """Return the interpreter, and why the previous one terminated, or an empty string."""
        restarted = ""
        if self._child is not None:
            self._check_child(has_signal=True)
            self._child.check_channel()
            restarted = self._child.exit_cause
            if restarted:
                self._drop_child()
        self._child = self._child or InterpreterProcess(self._spec, work=self._work, ruleset=self._ruleset)
        return self._child, restarted

    def _check_child(self, *, has_signal: bool) -> None:
        if has_signal:
            _drain(self._woken)
        if self._child is not None:
            if has_signal:
                self._child.collect_exits()
            self._child.watch()

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None


def _drain(fd: int) -> None:
    try:
        while os.read(fd, WAKEUP_BYTES):
            pass
    except BlockingIOError:
        return


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
        # Inherited: the supervisor looks into the interpreter, never the reverse.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                become_interpreter(
                    spec, work=work, ruleset=ruleset, requests=requests, results=results, output=output
                )
            except BaseException:  # noqa: BLE001  (the child must not continue as a second supervisor)
                for fd in (output, STANDARD_OUTPUT):  # the output may already have been moved
                    with contextlib.suppress(OSError):
                        os.write(fd, traceback.format_exc(limit=-1).encode())
            finally:
                os._exit(1)
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
        elif resident_bytes(pids) > self._spec.memory_mb * MEGABYTE:
            self.end("memory")
        elif files_exceed(self._spec.temp_dir_mb * MEGABYTE, folder=self._work, pids=pids):
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


class CodeExecution:
    """Execution of one call: sends the code, collects the output, and enforces the time limit.

    The interpreter is untrusted. Only one byte of its result is used, and only after this call's nonce.
    """

    def __init__(self, child: InterpreterProcess, code: str, *, spec: SandboxSpec) -> None:
        self.verdict = ""
        """`done`, `failed` or `interrupted`; empty while the code runs."""
        self.output = Output(spec.output_limit_bytes)
        self._child = child
        self._nonce = os.urandom(NONCE_BYTES)
        source = code.encode(errors="replace")
        self._to_send = memoryview(self._nonce + len(source).to_bytes(LENGTH_BYTES, "big") + source)
        self._result = b""
        self._grace_s = spec.interrupt_grace_s
        self._deadline = time.monotonic() + spec.time_limit_s
        self._is_interrupted = False

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the pipes of the interpreter."""
        selector.register(self._child.requests, selectors.EVENT_WRITE, self._send)
        selector.register(self._child.results, selectors.EVENT_READ, self._read_result)
        selector.register(self._child.output, selectors.EVENT_READ, self._read_output)

    def handle(self, selector: selectors.BaseSelector) -> set[int | object]:
        """Wait for up to `WATCH_INTERVAL_S`, transfer data, and return the other ready file objects."""
        wait_s = max(0.0, min(self._deadline - time.monotonic(), WATCH_INTERVAL_S))
        others: set[int | object] = set()
        for key, _ in selector.select(wait_s):
            if key.data is None:
                others.add(key.fileobj)
            elif not key.data():
                selector.unregister(key.fileobj)
        return others

    def check_clock(self) -> None:
        """Interrupt the code at the time limit, and kill the interpreter after the grace period."""
        if self.verdict or self._child.exit_cause or time.monotonic() < self._deadline:
            return
        if self._is_interrupted:
            self._child.end("time")
            return
        self._is_interrupted = True
        self._deadline = time.monotonic() + self._grace_s
        os.kill(self._child.pid, signal.SIGINT)

    def read_rest(self) -> None:
        """Read the output that remains in the pipe."""
        for _ in range(LAST_CHUNKS):
            if not self._read_output():
                return

    def _send(self) -> bool:
        try:
            self._to_send = self._to_send[os.write(self._child.requests, self._to_send) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False  # the interpreter is about to exit, or its time limit terminates it
        return len(self._to_send) > 0

    def _read_result(self) -> bool:
        data = os.read(self._child.results, NONCE_BYTES + 2)
        self._result += data
        if not data:
            self._child.wait_for_exit()
            return False
        if not self._result.startswith(self._nonce[: len(self._result)]):
            self._child.end("channel")
            return False
        if len(self._result) <= NONCE_BYTES:
            return True
        verdict = VERDICTS.get(self._result[NONCE_BYTES:])
        if verdict is None:
            self._child.end("channel")
        else:
            self.verdict = "interrupted" if self._is_interrupted else verdict
        return False

    def _read_output(self) -> bool:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._child.output, CHUNK_BYTES)
            self.output.add(data)
        return len(data) > 0


class Output:
    """Buffer of the beginning and the end of a stream. Its memory is limited to `limit_bytes` and one chunk."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_bytes = limit_bytes // 2
        self._tail_bytes = limit_bytes - self._head_bytes
        self._head = b""
        self._tail = b""
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Append the next bytes."""
        self._num_bytes += len(data)
        missing = self._head_bytes - len(self._head)
        self._head += data[:missing]
        self._tail = (self._tail + data[missing:])[-self._tail_bytes :]

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes between the two ends that were dropped."""
        return self._num_bytes - len(self._head) - len(self._tail)

    def text(self) -> str:
        """Return the output, with a line that states the number of dropped bytes, if any."""
        if not self.dropped_bytes:
            return (self._head + self._tail).decode(errors="replace")
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        return f"{head}\n[... {self.dropped_bytes} bytes of output left out ...]\n{tail}"
