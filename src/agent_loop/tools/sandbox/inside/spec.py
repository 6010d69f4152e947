"""Description of a sandbox that its processes receive."""

from __future__ import annotations

from dataclasses import dataclass

SCOPED_SIGNALS_VERSION = 6
"""First version of Landlock that can restrict signals."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Isolation and limits of a sandbox. It is sent as JSON."""

    landlock_version: int
    """The kernel's version of Landlock; 0 if it has none."""
    visible: list[str]
    """Files and folders of the host that are visible read-only, in addition to the system's and Python's."""
    preload: list[str]
    """Modules that are imported before the interpreter is forked."""
    seed: int | None
    """Seed of `random`; None for a different seed each time."""
    time_limit_s: float
    """Time limit of one call in seconds."""
    interrupt_grace_s: float
    """Seconds between the interrupt at the time limit and the kill."""
    memory_bytes: int
    """Limit on the address space of one process, and on the resident memory of all processes of a sandbox together."""
    cpu_seconds: int
    """Limit on the CPU time of one process, over all calls."""
    max_processes: int
    """Maximum number of processes and threads."""
    has_own_user: bool
    """Whether a sandbox runs as its own user, so that the kernel counts its processes separately from the agent's and
    does not let it signal them."""
    max_open_files: int
    max_file_bytes: int
    temp_dir_bytes: int
    output_bytes: int
    """Bytes of a call's output that are kept, half from the beginning and half from the end."""

    @property
    def scopes_signals(self) -> bool:
        """Whether Landlock contains signals."""
        return self.landlock_version >= SCOPED_SIGNALS_VERSION

    @property
    def signals_are_contained(self) -> bool:
        """Whether a signal to every process reaches only those of the sandbox."""
        return self.scopes_signals or self.has_own_user
