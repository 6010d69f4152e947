"""Entry point of a sandbox's Python: a guard, which forks the supervisor and cleans up after it.

Standard input is a socket to the agent's process. The command line contains the spec and the folder that the sandbox
may write to.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import socket
import sys
from collections.abc import Iterable

from agent_loop.tools.sandbox.inside import landlock, linux
from agent_loop.tools.sandbox.inside.files import make_work_folders, remove_folder
from agent_loop.tools.sandbox.inside.processes import change_user, kill_descendants, kill_user_processes
from agent_loop.tools.sandbox.inside.spec import SandboxSpec
from agent_loop.tools.sandbox.inside.supervisor import Supervisor, send

NICENESS = 10
"""Niceness of sandboxes, so that the agent's process has priority."""
UMASK = 0o022
"""Umask that is independent of the agent's."""
SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/alternatives",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FIRST_USER_ID = 30_000
NUM_USER_IDS = 20_000
"""Size of the range of user ids, which systems usually leave free."""


def main() -> None:
    """Start the supervisor, and clean up when it has ended."""
    control = _take_standard_input()
    spec, work = SandboxSpec(**json.loads(sys.argv[1])), sys.argv[2]
    os.nice(NICENESS)
    os.umask(UMASK)
    user_id, holder = os.geteuid(), None
    if user_id == 0:
        os.setgroups([])
        user_id, holder = _acquire_user()
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.fork()
    if supervisor == 0:
        try:
            _supervise(control, spec=spec, work=work, user_id=user_id)
        except Exception as error:  # noqa: BLE001  (start boundary: reported to the agent)
            with contextlib.suppress(OSError):
                send(control, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    control.close()
    os.waitpid(supervisor, 0)
    if holder is None:
        kill_descendants(signals_are_contained=False)
    else:
        kill_user_processes(user_id)
    remove_folder(work)


def shown_paths(visible: Iterable[str]) -> list[str]:
    """Return all files and folders that can be read: the system's, those of this Python, and the visible ones."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return [*SYSTEM_PATHS, *sorted({os.path.realpath(folder) for folder in folders} | folders), *visible]


def _supervise(control: socket.socket, *, spec: SandboxSpec, work: str, user_id: int) -> None:
    """Drop all privileges and serve calls until the agent closes its socket."""
    make_work_folders(work)
    if user_id != os.geteuid():
        for folder in (work, *(entry.path for entry in os.scandir(work))):
            os.chown(folder, user_id, user_id)
        linux.empty_bounding_set()
        change_user(user_id)
    shown = shown_paths(spec.visible)
    _check_access([work, *shown])
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the interpreter cannot inspect this process
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    if spec.scopes_signals:
        landlock.keep_signals_inside()
    ruleset = None
    if spec.landlock_version:
        ruleset = landlock.make_ruleset(
            version=spec.landlock_version, shown=shown, devices=DEVICES, work=work
        )
    for name in spec.preload:
        __import__(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            "a preloaded module started threads, which are lost in a fork; remove the module from preload"
        )
    supervisor = Supervisor(control, spec=spec, work=work, ruleset=ruleset)
    send(control, {"supervisor": os.getpid()})
    supervisor.serve()


def _acquire_user() -> tuple[int, socket.socket]:
    """Return a user id, and a socket whose name reserves the id on this machine until it is closed everywhere."""
    for number in random.sample(range(NUM_USER_IDS), NUM_USER_IDS):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0agent-loop-sandbox-user-{FIRST_USER_ID + number}")
        except OSError as error:
            holder.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return FIRST_USER_ID + number, holder
    raise OSError(errno.EUSERS, os.strerror(errno.EUSERS))


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


def _take_standard_input() -> socket.socket:
    """Return the socket under another descriptor, and replace standard input by `/dev/null`."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    return channel
