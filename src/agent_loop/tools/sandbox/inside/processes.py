"""The processes of a sandbox, as its supervisor sees them."""

from __future__ import annotations

import os
import resource
import signal
import time

PAGE_BYTES = resource.getpagesize()
PATIENCE_S = 5.0


def owns_namespace() -> bool:
    """Whether this is the first process of a process id namespace, so that all others in it are its own."""
    return os.getpid() == 1


def own_processes() -> list[int]:
    """All processes below this one; those that daemonized too, which the kernel hands to a sub-reaper."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    if owns_namespace():
        return [pid for pid in pids if pid != 1]
    parents = {pid: parent for pid in pids if (parent := _parent(pid)) is not None}
    own = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in own and pid not in own}:
        own |= new
    return sorted(own - {os.getpid()})


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


def end_processes() -> None:
    """Kills all processes below this one and waits until they are gone."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if owns_namespace():
            _kill(-1)
        else:
            for pid in own_processes():
                _kill(pid)
        if not _reap_one():
            return


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


def _reap_one() -> bool:
    """Waits for a child to end. False when there is none."""
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None
