"""Setup of a sandbox in a process that the zygote has forked."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from agent_loop.tools.sandbox.inside import landlock, linux, socket_messages
from agent_loop.tools.sandbox.inside.files import make_work_folders, remove_folder
from agent_loop.tools.sandbox.inside.processes import kill_descendants, kill_user_processes
from agent_loop.tools.sandbox.inside.root_filesystem import (
    DEVICES,
    USER_ID,
    mount_processes,
    mount_sandbox,
    shown_paths,
)
from agent_loop.tools.sandbox.inside.spec import SandboxSpec
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
class SandboxSetup:
    """Setup of a sandbox in a newly forked process."""

    control: socket.socket
    """Socket to the agent's process."""
    zygote: socket.socket
    """Socket to the zygote: sends a byte when the namespaces exist, and receives one when the user is mapped."""
    spec: SandboxSpec
    work: str
    """The folder that the sandbox may write to."""
    host_id: int
    """User id of the sandbox on the host."""
    user_namespaces: bool
    """Whether the sandbox gets its own user namespace."""

    def run(self) -> None:
        """Fork the supervisor, since a process cannot enter a process id namespace itself.

        Without namespaces, the parent waits for the supervisor and cleans up after it.

        Raises:
            OSError: The kernel refuses.
        """
        is_root = os.geteuid() == 0
        if is_root:
            os.setgroups([])
        self._enter_namespaces()
        if not self.spec.namespaces:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        supervisor = os.fork()
        if supervisor != 0:
            if not self.spec.namespaces:
                self._clean_up_after(supervisor)
            return
        if self.spec.namespaces:
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            mount_processes()
            mount_sandbox(self.spec.temp_dir_bytes)
            socket.sethostname("sandbox")
        make_work_folders(self.work)
        if is_root and not self.user_namespaces:
            _change_owner(self.work, owner=self.host_id)
            linux.empty_bounding_set()
            change_user(self.host_id)
        if not self.spec.namespaces:
            _check_access([self.work, *shown_paths(self.spec.visible)])
        supervise(self.control, spec=self.spec, work=self.work)

    def _enter_namespaces(self) -> None:
        if self.spec.namespaces:
            linux.unshare(SANDBOX_NAMESPACES | (linux.CLONE_NEWUSER if self.user_namespaces else 0))
        self.zygote.send(b"u")
        if self.user_namespaces:
            if not self.zygote.recv(1):
                raise OSError("the sandbox's user could not be mapped")
            change_user(USER_ID)
        self.zygote.close()

    def _clean_up_after(self, supervisor: int) -> None:
        """Kill the processes that a killed supervisor left, and remove the folder with the rights of this process."""
        os.waitpid(supervisor, 0)
        if self.host_id != os.geteuid():
            kill_user_processes(self.host_id)
        else:
            kill_descendants(signals_are_contained=False)
        remove_folder(self.work)


def supervise(control: socket.socket, *, spec: SandboxSpec, work: str) -> None:
    """Drop all privileges and serve calls until the agent closes its socket."""
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the interpreter cannot inspect this process
    if not spec.namespaces:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    if spec.scopes_signals:
        landlock.keep_signals_inside()
    ruleset = _make_ruleset(spec, work=work) if spec.mechanism == "landlock" else None
    handle = os.pidfd_open(os.getpid())
    supervisor = Supervisor(control, spec=spec, work=work, ruleset=ruleset)
    socket_messages.send(control, {"ready": True}, fds=[handle])
    os.close(handle)
    supervisor.serve()


def write_user_map(pid: int, *, host_id: int, inside_id: int = USER_ID) -> None:
    """Map one user of the host into the user namespace of a process.

    Raises:
        OSError: The kernel refuses.
    """
    with open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("deny")
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(f"{inside_id} {host_id} 1")


def _make_ruleset(spec: SandboxSpec, *, work: str) -> int:
    return landlock.make_ruleset(
        version=spec.landlock_version,
        shown=shown_paths(spec.visible),
        devices=[f"/dev/{name}" for name in DEVICES],
        work=work,
    )


def _check_access(paths: Iterable[str]) -> None:
    for path in paths:
        try:
            os.stat(path)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise PermissionError(
                f"user {os.geteuid()} of the sandbox cannot reach {path}; open the folders above it to others "
                "(chmod o+x), or set `python` (or TMPDIR) to another path"
            ) from error


def _change_owner(work: str, *, owner: int) -> None:
    for folder in (work, *(entry.path for entry in os.scandir(work))):
        os.chown(folder, owner, owner)
