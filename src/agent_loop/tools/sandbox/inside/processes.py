"""The processes of a sandbox, as its supervisor sees them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Callable

from agent_loop.tools.sandbox.inside.users import change_user

PAGE_BYTES = resource.getpagesize()
PATIENCE_S = 5.0
LISTED_CHILDREN = "/proc/self/task/{}/children"


def owns_namespace() -> bool:
    """Whether this is the first process of a process id namespace, so that all others in it are its own."""
    return os.getpid() == 1


def own_processes() -> list[int]:
    """All processes below this one; those that daemonized too, which the kernel hands to a sub-reaper."""
    if owns_namespace():
        return [pid for pid in _all_processes() if pid != 1]
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
    """Memory that the processes hold, shared pages counted for each."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                total += int(file.read().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            continue  # it ended
    return total


def count_threads(pids: list[int]) -> int:
    """Those of all the processes together."""
    total = 0
    for pid in pids:
        try:
            total += len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
    return total


def end_processes(*, reaches_own_alone: bool) -> None:
    """Kills all processes below this one and waits until they are gone.

    Args:
        reaches_own_alone: A signal to every process reaches those alone, as it does where this is the first of a
            namespace; none of them escapes it by starting others.
    """
    _end(lambda: _kill(-1) if reaches_own_alone or owns_namespace() else _kill_tree())


def end_user(user_id: int) -> None:
    """Kills all processes of a user's and waits until those below this one are gone."""
    _end(lambda: _kill_all_of(user_id))


def reap() -> dict[int, int]:
    """Collects children that ended. Returns wait statuses by process id."""
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
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            os.waitpid(-1, os.WNOHANG)
            kill()
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_tree() -> None:
    for pid in own_processes():
        _kill(pid)


def _kill_all_of(user_id: int) -> None:
    """By a process of that user's, which the kernel leaves out itself."""
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


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _listed_children(pid: int) -> list[int]:
    children = list[int]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += [int(child) for child in file.read().split()]
    return children


def _found_children() -> Callable[[int], list[int]]:
    """For kernels that do not list them."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in _all_processes():
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
            children[int(file.read().rpartition(")")[2].split()[1])].append(pid)
    return lambda pid: children[pid]
