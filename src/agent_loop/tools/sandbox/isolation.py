"""Isolation of sandboxes, as measured from inside one."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.tools.sandbox.settings import Mechanism


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation in force. Each property was tested from inside a sandbox."""

    mechanism: Mechanism
    files: bool
    """Whether no files of the host can be read except the visible ones, and nothing outside the sandbox's folder can be
    written."""
    network: bool
    """Whether no network address can be reached, including addresses and Unix sockets of this machine."""
    processes: bool
    """Whether the host's processes cannot be signalled or inspected, and the code's own end with the sandbox."""
    privileges: bool
    """Whether the code has no capabilities and cannot gain any by running a program."""
    limits: bool
    """Whether memory, CPU time, processes, open files and file sizes are limited."""
    own_view: bool
    """Whether names and sizes of the host's files, and ids of its processes, are hidden too."""
    own_user: bool
    """Whether the code runs as a different user of the host than the agent."""
    system_calls: bool
    """Whether system calls that are common in attacks on a kernel are refused."""
    own_disk: bool
    """Whether files are written to a file system with a size limit that disappears with the sandbox."""

    @property
    def is_sufficient(self) -> bool:
        """Whether untrusted code may run: files, network, processes, privileges and limits are all in force."""
        return self.files and self.network and self.processes and self.privileges and self.limits

    def __str__(self) -> str:
        return f"{self.mechanism}: {self.describe()}"

    def describe(self) -> str:
        """Return the properties in force, and those that are not."""
        claims = {
            "files of the host out of reach": self.files,
            "no network": self.network,
            "processes of the host out of reach": self.processes,
            "no privileges": self.privileges,
            "limits of memory, CPU, processes and files": self.limits,
            "own view of files and processes": self.own_view,
            "own user": self.own_user,
            "filtered system calls": self.system_calls,
            "own file system for what is written": self.own_disk,
        }
        missing = [claim for claim, holds in claims.items() if not holds]
        in_force = "; ".join(claim for claim, holds in claims.items() if holds)
        return f"{in_force} (not in force: {'; '.join(missing)})" if missing else in_force
