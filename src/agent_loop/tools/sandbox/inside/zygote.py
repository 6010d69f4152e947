"""Makes sandboxes by forking: a small process that has Python and the preloaded modules ready, and nothing else.

It sees the sandbox's file system only. With namespaces it is the first process of a process id namespace, so that
its end is the end of every sandbox.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import selectors
import shutil
import signal
import socket
from collections.abc import Generator
from dataclasses import dataclass

from agent_loop.tools.sandbox.inside import linux, wire
from agent_loop.tools.sandbox.inside.plan import Plan
from agent_loop.tools.sandbox.inside.root import (
    SANDBOX,
    USER_ID,
    make_work_folders,
    mount_processes,
    mount_sandbox,
)
from agent_loop.tools.sandbox.inside.supervisor import Supervisor

SANDBOX_NAMESPACES = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
FIRST_HOST_USER_ID = 30_000
NUM_HOST_USER_IDS = 20_000
"""Where the agent runs as root, each sandbox gets a user of its own from this range, which systems leave free."""


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
        self._is_root = os.geteuid() == 0
        self._num_started = random.randrange(
            NUM_HOST_USER_IDS
        )  # other agents on this machine begin elsewhere
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
        self._num_started += 1
        host_id = self._host_user_id()
        with socket.socket(fileno=fds[0]) as control, _reporting_to(control):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for inherited in (self._selector, self._requests, ours):
                    inherited.close()
                with _ending_this_process(), _reporting_to(control):
                    work = str(message.get("work") or SANDBOX)
                    self._become_sandbox(control, zygote=theirs, host_id=host_id, work=work)
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

    def _host_user_id(self) -> int:
        if not self._is_root:
            return os.geteuid()
        return FIRST_HOST_USER_ID + self._num_started % NUM_HOST_USER_IDS

    def _become_sandbox(
        self, control: socket.socket, *, zygote: socket.socket, host_id: int, work: str
    ) -> None:
        """Moves into new namespaces; the supervisor is forked, since a process cannot change its own process ids."""
        if self._is_root:
            os.setgroups([])
        if self._plan.namespaces:
            linux.unshare(SANDBOX_NAMESPACES | (linux.CLONE_NEWUSER if self._user_namespaces else 0))
        zygote.send(b"u")
        if self._user_namespaces:
            if not zygote.recv(1):
                raise OSError("the sandbox's user could not be named")
            change_user(USER_ID)
        zygote.close()
        if os.fork() != 0:
            if not self._plan.namespaces:
                _remove_when_ended(work)
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._plan.namespaces:
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            mount_processes()
            mount_sandbox(self._plan.temp_dir_bytes)
            socket.sethostname("sandbox")
        make_work_folders(work)
        if self._is_root and not self._user_namespaces:
            _give_folders(work, owner=host_id)
            linux.empty_bounding_set()
            change_user(host_id)
        supervise(control, plan=self._plan, work=work)


def supervise(control: socket.socket, *, plan: Plan, work: str) -> None:
    """Gives up all privileges and serves calls until the agent goes away."""
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the interpreter cannot look into this process
    if not plan.namespaces:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    handle = os.pidfd_open(os.getpid())
    supervisor = Supervisor(control, plan=plan, work=work)
    wire.send(control, {"ready": True}, fds=[handle])
    os.close(handle)
    supervisor.serve()


def write_user_map(pid: int, *, host_id: int, inside_id: int = USER_ID) -> None:
    """Names one user of the host in the user namespace of a process.

    Raises:
        OSError: The kernel refuses.
    """
    with open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("deny")
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(f"{inside_id} {host_id} 1")


def change_user(user_id: int) -> None:
    """Becomes another user for good, keeping capabilities where the kernel lets them."""
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def _remove_when_ended(work: str) -> None:
    """Waits for the supervisor, which may lack the right to remove its folder, and removes it."""
    with contextlib.suppress(ChildProcessError):
        os.wait()
    shutil.rmtree(work, ignore_errors=True)


def _give_folders(work: str, *, owner: int) -> None:
    for folder in (work, *(entry.path for entry in os.scandir(work))):
        os.chown(folder, owner, owner)


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
