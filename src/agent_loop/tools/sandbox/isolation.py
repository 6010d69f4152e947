"""What shuts code in, as it was found by trying."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.tools.sandbox.settings import Mechanism


@dataclass(frozen=True, slots=True)
class Isolation:
    """What is in force. Each claim was tried from inside a sandbox."""

    mechanism: Mechanism
    files: bool
    """The host's files cannot be read, but those that are shown, and nothing outside the sandbox's own folder can be
    written."""
    network: bool
    """No address answers, those of this machine included, nor do its Unix sockets."""
    processes: bool
    """The host's processes cannot be signalled or looked into; all that code starts ends with its sandbox."""
    privileges: bool
    """No capabilities, and no program gives any."""
    limits: bool
    """Memory, CPU time, processes, open files and file sizes are limited."""
    own_view: bool
    """Names and sizes of the host's files, and the ids of its processes, are out of sight too."""
    own_user: bool
    """Another user for the host than the agent's."""
    system_calls: bool
    """Those that attacks on a kernel begin with are refused."""
    own_disk: bool
    """What is written goes to a file system with a size, which vanishes with the sandbox whatever happens."""

    @property
    def has_minimum(self) -> bool:
        """Whether code that nobody has read may run: files, network, processes, privileges, limits."""
        return self.files and self.network and self.processes and self.privileges and self.limits

    def __str__(self) -> str:
        return f"{self.mechanism}: {self.describe()}"

    def describe(self) -> str:
        """What is in force, and what is not."""
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
