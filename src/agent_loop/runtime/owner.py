"""Identity of the process that owns a resource, so that a later process can remove what a killed one left.

Names of containers and folders, and the variable `AGENT_LOOP_OWNER` of child processes, begin with the token of their
owner. Only resources whose owner is known to be dead are removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OWNER_VARIABLE = "AGENT_LOOP_OWNER"
"""Environment variable of child processes. Their own children inherit it, also those that leave the process group."""
SPARED_SUFFIX = ".spared"
"""End of the variable of processes that end by themselves, and would leave a mess if they were killed halfway."""
KILL_ROUNDS = 50
"""How often processes are looked for and killed, at most. Processes may fork while they are being killed."""

_TOKEN = re.compile(r"al([0-9a-f]{8})\.([0-9a-f]{8})\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of a machine, distinguished from later processes with the same id."""

    machine: str
    """Hash of the host name and the machine's id."""
    boot: str
    """Hash of the boot id and the namespace of process ids."""
    pid: int
    start: int
    """Start time of the process, in clock ticks since boot."""

    @property
    def token(self) -> str:
        """Text that begins the names of the owner's resources."""
        return f"al{self.machine}.{self.boot}.{self.pid}.{self.start}"

    @property
    def is_dead(self) -> bool:
        """Whether the process is known to have ended. False for processes of other machines and containers."""
        this = this_process()
        if (self.machine, self.boot) != (this.machine, this.boot):
            return False
        return _start_time(self.pid) != self.start


def parse_owner(name: str) -> Owner | None:
    """Return the owner whose token begins a name, or None."""
    match = _TOKEN.match(name)
    if match is None:
        return None
    return Owner(match[1], match[2], int(match[3]), int(match[4]))


def this_process() -> Owner:
    """Return the identity of this process."""
    return _owner(os.getpid())


def kill_processes(is_meant: Callable[[str], bool]) -> int:
    """Kill the processes whose `AGENT_LOOP_OWNER` is meant, wait for their end, and return how many they were."""
    killed: set[int] = set()
    for _ in range(KILL_ROUNDS):
        found = [pid for pid, owner in _marked_processes() if is_meant(owner) and pid != os.getpid()]
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.02)
    return len(killed)


def kill_orphans() -> int:
    """Kill the processes whose `AGENT_LOOP_OWNER` is meant, wait for their end, and return how many they were."""
    return kill_processes(lambda name: _is_of_the_dead(name) and not name.endswith(SPARED_SUFFIX))


def num_spared_orphans() -> int:
    """Return the number of spared processes whose owner is dead."""
    names = [name for _, name in _marked_processes() if name.endswith(SPARED_SUFFIX)]
    return sum(_is_of_the_dead(name) for name in names)


def _is_of_the_dead(name: str) -> bool:
    owner = parse_owner(name)
    return owner is not None and owner.is_dead


def _marked_processes() -> Iterator[tuple[int, str]]:
    """Yield the processes that have the variable, with its value.

    Zombies have no environment. Processes in containers, and the monitors of containers, end with their container.
    """
    prefix = f"{OWNER_VARIABLE}=".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes()
            if prefix not in variables or (folder / "comm").read_text().strip() == "conmon":
                continue
            if (folder / "ns/pid").readlink() != Path("/proc/self/ns/pid").readlink():
                continue
        except OSError:
            continue
        for variable in variables.split(b"\0"):
            if variable.startswith(prefix):
                yield int(folder.name), variable.removeprefix(prefix).decode(errors="replace")


@cache
def _owner(pid: int) -> Owner:
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return Owner(
        machine=_hash(socket.gethostname(), _read("/etc/machine-id")),
        boot=_hash(_read("/proc/sys/kernel/random/boot_id"), namespace),
        pid=pid,
        start=_start_time(pid) or 0,
    )


def _start_time(pid: int) -> int | None:
    """Return the start time of a process; None if there is no such process, or it has ended."""
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if stat:
        return None if stat[0] in "ZX" else int(stat[19])
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
