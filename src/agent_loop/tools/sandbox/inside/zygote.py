"""Fork server of sandboxes: a small process with Python and the preloaded modules.

It sees the sandbox's file system only. With namespaces it is the first process of a process id namespace, so every
sandbox terminates with it.
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

from agent_loop.tools.sandbox.inside import linux, socket_messages
from agent_loop.tools.sandbox.inside.root_filesystem import SANDBOX
from agent_loop.tools.sandbox.inside.setup import SandboxSetup, write_user_map
from agent_loop.tools.sandbox.inside.spec import SandboxSpec
from agent_loop.tools.sandbox.inside.users import HostUsers


@dataclass(frozen=True, slots=True)
class _Start:
    """Sandbox that is entering its namespaces."""

    pid: int
    zygote_end: socket.socket
    """Socket to the sandbox: receives a byte when the namespaces exist, and sends one when the user is mapped."""
    host_id: int


class Zygote:
    """Fork server that starts a sandbox for each request.

    Args:
        requests: Socket whose messages each carry the control socket of a new sandbox.
        spec: Isolation and limits of the sandboxes.
        user_namespaces: Whether each sandbox gets its own user namespace.
    """

    def __init__(self, requests: socket.socket, *, spec: SandboxSpec, user_namespaces: bool) -> None:
        self._requests = requests
        self._spec = spec
        self._user_namespaces = user_namespaces
        self._users = HostUsers() if os.geteuid() == 0 else None
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Start sandboxes until the other end of the socket closes."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps exited children
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
        """Fork a sandbox. Return False when the other end of the socket is closed."""
        received = socket_messages.receive(self._requests, max_fds=1)
        if received is None:
            return False
        message, fds = received
        with socket.socket(fileno=fds[0]) as control, _reporting_to(control), contextlib.ExitStack() as stack:
            host_id = os.geteuid()
            if self._users is not None:
                host_id, holder = self._users.acquire()
                stack.enter_context(holder)
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for inherited in (self._selector, self._requests, ours):
                    inherited.close()
                with _ending_this_process(), _reporting_to(control):
                    setup = SandboxSetup(
                        control,
                        zygote=theirs,
                        spec=self._spec,
                        work=str(message.get("work") or SANDBOX),
                        host_id=host_id,
                        user_namespaces=self._user_namespaces,
                    )
                    setup.run()
            theirs.close()
            start = _Start(pid, zygote_end=ours, host_id=host_id)
            self._selector.register(ours, selectors.EVENT_READ, start)
        return True

    def _finish_start(self, start: _Start) -> None:
        """Map the user of a sandbox that has entered its namespaces."""
        self._selector.unregister(start.zygote_end)
        with start.zygote_end, contextlib.suppress(OSError):  # the sandbox reports the missing user
            if start.zygote_end.recv(1) and self._user_namespaces:
                write_user_map(start.pid, host_id=start.host_id)
                start.zygote_end.send(b"m")


@contextlib.contextmanager
def _reporting_to(control: socket.socket) -> Generator[None]:
    """Send an exception of the body to the agent."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (start boundary: reported to the agent)
        with contextlib.suppress(OSError):
            socket_messages.send(control, {"error": f"{type(error).__name__}: {error}"})


@contextlib.contextmanager
def _ending_this_process() -> Generator[None]:
    """Exit this process after the body, since a forked process must not continue as a second zygote."""
    try:
        yield
    finally:
        os._exit(0)
