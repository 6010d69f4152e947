"""Processes of a sandbox: listing, measuring and killing them, from its supervisor."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Callable

PAGE_BYTES = resource.getpagesize()
KILL_TIMEOUT_S = 5.0
LISTED_CHILDREN = "/proc/self/task/{}/children"


def change_user(user_id: int) -> None:
    """Permanently change the user of this process."""
    try:
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    except OSError as error:
        raise OSError(error.errno, f"cannot become user {user_id}: {error.strerror}") from error


def list_descendants() -> list[int]:
    """Return all descendants of this process, including daemons, which the kernel assigns to a subreaper."""
    children_of = (
        _listed_children if os.path.exists(LISTED_CHILDREN.format(os.getpid())) else _found_children()
    )
    own = list[int]()
    ahead = [os.getpid()]
    while ahead:
        children = children_of(ahead.pop())
        own += children
        ahead += children
    return own


def resident_bytes(pids: list[int]) -> int:
    """Return the resident memory of the processes. Shared pages are counted once per process."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                total += int(file.read().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            continue  # the process has exited
    return total


def count_threads(pids: list[int]) -> int:
    """Return the number of threads of all the processes together."""
    total = 0
    for pid in pids:
        try:
            total += len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has exited
    return total


def kill_descendants(*, signals_are_contained: bool) -> None:
    """Kill all descendants of this process and wait until they have exited.

    Args:
        signals_are_contained: Whether a signal to every process reaches only the descendants. No descendant can then
            escape by forking.
    """
    _end(lambda: _kill(-1) if signals_are_contained else _kill_tree())


def kill_user_processes(user_id: int) -> None:
    """Kill all processes of a user, and wait until those below this process have exited."""
    _end(lambda: _kill_all_of(user_id))


def reap() -> dict[int, int]:
    """Reap exited children. Return their wait statuses by process id."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def _end(kill: Callable[[], None]) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            os.waitpid(-1, os.WNOHANG)
            kill()
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_tree() -> None:
    for pid in list_descendants():
        _kill(pid)


def _kill_all_of(user_id: int) -> None:
    """Kill all processes of a user, from a child process of that user, since the kernel excludes the sender."""
    pid = os.fork()
    if pid == 0:
        try:
            change_user(user_id)
            _kill(-1)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _listed_children(pid: int) -> list[int]:
    children = list[int]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has exited
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += [int(child) for child in file.read().split()]
    return children


def _found_children() -> Callable[[int], list[int]]:
    """Return a function that looks up children, for kernels that do not list them."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
            children[int(file.read().rpartition(")")[2].split()[1])].append(pid)
    return lambda pid: children[pid]
