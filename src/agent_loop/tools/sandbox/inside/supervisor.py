"""The first process of a sandbox: starts the interpreter, feeds it calls, holds it to its limits.

Consumes calls from the control socket; waits for the interpreter, the clock and the limits; produces one reply for
each call. When the other end of the control socket closes, it returns, and ends everything in the sandbox.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from dataclasses import asdict, dataclass

from agent_loop.tools.sandbox.inside import wire
from agent_loop.tools.sandbox.inside.call import Call
from agent_loop.tools.sandbox.inside.child import WATCH_INTERVAL_S, Child
from agent_loop.tools.sandbox.inside.plan import Plan
from agent_loop.tools.sandbox.inside.processes import count_threads, end_processes, own_processes

WAKEUP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one call."""

    ending: str
    """`done`; `failed`: the code raised; `interrupted`: at the time limit, state kept; `lost`: the interpreter is
    gone, and the state with it."""
    end_cause: str
    """Why the interpreter is gone, where it is; see `Child`."""
    output: str
    dropped_bytes: int
    seconds: float
    restarted: str
    """Why the interpreter of the call before was gone when this one began, with a new one; empty if it was there."""


class Supervisor:
    """See the module.

    Args:
        control: The socket to the agent's process.
        plan: The limits.
        work: The folder that the interpreter may write to.
        ruleset: Landlock's for interpreters, if it is what shuts them in.
    """

    def __init__(self, control: socket.socket, *, plan: Plan, work: str, ruleset: int | None = None) -> None:
        self._control = control
        self._plan = plan
        self._work = work
        self._ruleset = ruleset
        self._child: Child | None = None
        self._woken, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answers calls until the other end of the control socket closes."""
        while self._wait_for_call():
            received = wire.receive(self._control)
            reply = None if received is None else self._answer(str(received[0]["code"]))
            if reply is None:
                break
            wire.send(self._control, asdict(reply))
        end_processes(reaches_own_alone=self._plan.reaches_own_alone)

    def _wait_for_call(self) -> bool:
        """Waits for something to read from the agent; meanwhile, processes left running are watched."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                is_quiet = self._child is None or count_threads(own_processes()) <= 1
                ready = {key.fileobj for key, _ in selector.select(None if is_quiet else WATCH_INTERVAL_S)}
                if self._control in ready:
                    return True
                self._look_after_child(has_signal=self._woken in ready)

    def _answer(self, code: str) -> Reply | None:
        """Runs one call. None when the agent went away meanwhile."""
        child, restarted = self._prepare_child()
        call = Call(child, code, plan=self._plan)
        started = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            call.register(selector)
            while not call.verdict and not child.end_cause:
                ready = call.handle(selector)
                if self._control in ready:
                    return None
                if not call.verdict:
                    self._look_after_child(has_signal=self._woken in ready)
                    call.check_clock()
        call.read_rest()
        if child.end_cause:
            self._drop_child()
        return Reply(
            ending="lost" if child.end_cause else call.verdict,
            end_cause=child.end_cause,
            output=call.output.text(),
            dropped_bytes=call.output.dropped_bytes,
            seconds=time.monotonic() - started,
            restarted=restarted,
        )

    def _prepare_child(self) -> tuple[Child, str]:
        """The interpreter, and why the one before is gone, if it is."""
        restarted = ""
        if self._child is not None:
            self._look_after_child(has_signal=True)
            self._child.check_channel()
            restarted = self._child.end_cause
            if restarted:
                self._drop_child()
        self._child = self._child or Child(self._plan, work=self._work, ruleset=self._ruleset)
        return self._child, restarted

    def _look_after_child(self, *, has_signal: bool) -> None:
        if has_signal:
            _drain(self._woken)
        if self._child is not None:
            if has_signal:
                self._child.note_end()
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
