"""What shuts code in, as it was found by trying."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.tools.sandbox.settings import Mechanism


@dataclass(frozen=True, slots=True)
class Isolation:
    """What is in force. Each claim was tried from inside a sandbox."""

    mechanism: Mechanism
    files: bool
    """The host's files are out of sight, and nothing outside the sandbox's own folder can be written."""
    network: bool
    """No address answers, those of this machine included, nor do its Unix sockets."""
    processes: bool
    """The host's processes are out of sight; all that code starts ends with its sandbox."""
    privileges: bool
    """No capabilities, and no program gives any."""
    own_user: bool
    """Another user for the host than the agent's."""
    system_calls: bool
    """Those that attacks on a kernel begin with are refused."""
    temp_dir_size: bool
    """What is written is limited in all, and vanishes with the sandbox whatever happens."""
    limits: bool
    """Memory, CPU time, processes, open files and file sizes are limited."""

    @property
    def has_minimum(self) -> bool:
        """Whether code that nobody has read may run: own files, no network, own processes, no privileges, limits."""
        return self.files and self.network and self.processes and self.privileges and self.limits

    def __str__(self) -> str:
        return f"{self.mechanism}: {'; '.join(self._describe(True))}" + (
            f" (not in force: {'; '.join(missing)})" if (missing := self._describe(False)) else ""
        )

    def _describe(self, value: bool) -> list[str]:
        claims = {
            "own view of files, read-only": self.files,
            "no network": self.network,
            "own process tree": self.processes,
            "no privileges": self.privileges,
            "own user": self.own_user,
            "filtered system calls": self.system_calls,
            "temporary files limited in all": self.temp_dir_size,
            "limits of memory, CPU, processes and files": self.limits,
        }
        return [claim for claim, holds in claims.items() if holds is value]
