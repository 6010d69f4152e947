"""First process of a sandbox: it starts the interpreter, sends it calls and enforces its limits.

The supervisor consumes calls from the control socket. It waits for the interpreter, the time limit and the other
limits, and produces one result per call. When the other end of the control socket closes, it kills everything in the
sandbox and returns.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent_loop.tools.sandbox.inside.execution import CodeExecution
from agent_loop.tools.sandbox.inside.interpreter_process import WATCH_INTERVAL_S, InterpreterProcess
from agent_loop.tools.sandbox.inside.processes import count_threads, kill_descendants, list_descendants
from agent_loop.tools.sandbox.inside.spec import SandboxSpec

WAKEUP_BYTES = 4096


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
