"""Makes sandboxes by forking: a small process that has Python and the preloaded modules ready, and nothing else.

It sees the sandbox's file system only. With namespaces it is the first process of a process id namespace, so that
its end is the end of every sandbox.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
from collections.abc import Generator
from dataclasses import dataclass

from agent_loop.tools.sandbox.inside import linux, wire
from agent_loop.tools.sandbox.inside.newborn import Newborn, write_user_map
from agent_loop.tools.sandbox.inside.plan import Plan
from agent_loop.tools.sandbox.inside.root import SANDBOX
from agent_loop.tools.sandbox.inside.users import HostUsers


@dataclass(frozen=True, slots=True)
class _Start:
    """A sandbox on its way into its namespaces."""

    pid: int
    zygote_end: socket.socket
    """Brings a byte when it is there, and takes one back when its user has a name."""
    host_id: int


class Zygote:
    """Serves requests for sandboxes.

    Args:
        requests: Each message on it brings the control socket of a new sandbox.
        plan: How sandboxes are made.
        user_namespaces: Whether each gets a user namespace of its own.
    """

    def __init__(self, requests: socket.socket, *, plan: Plan, user_namespaces: bool) -> None:
        self._requests = requests
        self._plan = plan
        self._user_namespaces = user_namespaces
        self._users = HostUsers() if os.geteuid() == 0 else None
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Starts sandboxes until the other end of the socket closes."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects what ended
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        gc.freeze()
        self._selector.register(self._requests, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._finish_start(key.data)
                elif not self._begin_start():
                    return

    def _begin_start(self) -> bool:
        """Forks a sandbox. False when there is nobody left who wants one."""
        received = wire.receive(self._requests, max_fds=1)
        if received is None:
            return False
        message, fds = received
        with socket.socket(fileno=fds[0]) as control, _reporting_to(control), contextlib.ExitStack() as stack:
            host_id = os.geteuid()
            if self._users is not None:
                host_id, holder = self._users.take()
                stack.enter_context(holder)
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for inherited in (self._selector, self._requests, ours):
                    inherited.close()
                with _ending_this_process(), _reporting_to(control):
                    newborn = Newborn(
                        control,
                        zygote=theirs,
                        plan=self._plan,
                        work=str(message.get("work") or SANDBOX),
                        host_id=host_id,
                        user_namespaces=self._user_namespaces,
                    )
                    newborn.become_sandbox()
            theirs.close()
            start = _Start(pid, zygote_end=ours, host_id=host_id)
            self._selector.register(ours, selectors.EVENT_READ, start)
        return True

    def _finish_start(self, start: _Start) -> None:
        """Names the user of a sandbox that has its namespaces."""
        self._selector.unregister(start.zygote_end)
        with start.zygote_end, contextlib.suppress(OSError):  # the sandbox reports that it got no user
            if start.zygote_end.recv(1) and self._user_namespaces:
                write_user_map(start.pid, host_id=start.host_id)
                start.zygote_end.send(b"m")


@contextlib.contextmanager
def _reporting_to(control: socket.socket) -> Generator[None]:
    """What goes wrong in the body is sent to the agent."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (start boundary: told to the agent)
        with contextlib.suppress(OSError):
            wire.send(control, {"error": f"{type(error).__name__}: {error}"})


@contextlib.contextmanager
def _ending_this_process() -> Generator[None]:
    """A forked process must not go on as a second zygote."""
    try:
        yield
    finally:
        os._exit(0)
