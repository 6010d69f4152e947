"""From a fork of the zygote to the supervisor of a sandbox."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from agent_loop.tools.sandbox.inside import landlock, linux, wire
from agent_loop.tools.sandbox.inside.files import make_work_folders, remove_folder
from agent_loop.tools.sandbox.inside.plan import Plan
from agent_loop.tools.sandbox.inside.processes import end_processes, end_user
from agent_loop.tools.sandbox.inside.root import (
    DEVICES,
    USER_ID,
    mount_processes,
    mount_sandbox,
    shown_paths,
)
from agent_loop.tools.sandbox.inside.supervisor import Supervisor
from agent_loop.tools.sandbox.inside.users import change_user

SANDBOX_NAMESPACES = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)


@dataclass(frozen=True, slots=True)
class Newborn:
    """A process that has just been forked."""

    control: socket.socket
    """To the agent's process."""
    zygote: socket.socket
    """Takes a byte when the namespaces are there, and brings one when the user has a name."""
    plan: Plan
    work: str
    """The folder that the sandbox may write to."""
    host_id: int
    """Who it is to be for the host."""
    user_namespaces: bool
    """Whether it gets one."""

    def become_sandbox(self) -> None:
        """Forks the supervisor, since a process cannot change its own process ids, and returns when both are done.

        Raises:
            OSError: The kernel refuses.
        """
        is_root = os.geteuid() == 0
        if is_root:
            os.setgroups([])
        self._enter_namespaces()
        if not self.plan.namespaces:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        supervisor = os.fork()
        if supervisor != 0:
            if not self.plan.namespaces:
                self._clean_up_after(supervisor)
            return
        if self.plan.namespaces:
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            mount_processes()
            mount_sandbox(self.plan.temp_dir_bytes)
            socket.sethostname("sandbox")
        make_work_folders(self.work)
        if is_root and not self.user_namespaces:
            _give_folders(self.work, owner=self.host_id)
            linux.empty_bounding_set()
            change_user(self.host_id)
        if not self.plan.namespaces:
            _check_reach([self.work, *shown_paths(self.plan.visible)])
        supervise(self.control, plan=self.plan, work=self.work)

    def _enter_namespaces(self) -> None:
        if self.plan.namespaces:
            linux.unshare(SANDBOX_NAMESPACES | (linux.CLONE_NEWUSER if self.user_namespaces else 0))
        self.zygote.send(b"u")
        if self.user_namespaces:
            if not self.zygote.recv(1):
                raise OSError("the sandbox's user could not be named")
            change_user(USER_ID)
        self.zygote.close()

    def _clean_up_after(self, supervisor: int) -> None:
        """Ends what a supervisor that was killed left, and removes the folder, which it may lack the right to."""
        os.waitpid(supervisor, 0)
        if self.host_id != os.geteuid():
            end_user(self.host_id)
        else:
            end_processes(reaches_own_alone=False)
        remove_folder(self.work)


def supervise(control: socket.socket, *, plan: Plan, work: str) -> None:
    """Gives up all privileges and serves calls until the agent goes away."""
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the interpreter cannot look into this process
    if not plan.namespaces:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    if plan.scopes_signals:
        landlock.keep_signals_inside()
    ruleset = _make_ruleset(plan, work=work) if plan.mechanism == "landlock" else None
    handle = os.pidfd_open(os.getpid())
    supervisor = Supervisor(control, plan=plan, work=work, ruleset=ruleset)
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


def _make_ruleset(plan: Plan, *, work: str) -> int:
    return landlock.make_ruleset(
        version=plan.landlock_version,
        shown=shown_paths(plan.visible),
        devices=[f"/dev/{name}" for name in DEVICES],
        work=work,
    )


def _check_reach(paths: Iterable[str]) -> None:
    for path in paths:
        try:
            os.stat(path)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise PermissionError(
                f"{path} is out of reach of user {os.geteuid()}, who the sandbox is: open the folders above it to "
                "others (chmod o+x), or let `python` (or TMPDIR) name another place"
            ) from error


def _give_folders(work: str, *, owner: int) -> None:
    for folder in (work, *(entry.path for entry in os.scandir(work))):
        os.chown(folder, owner, owner)
