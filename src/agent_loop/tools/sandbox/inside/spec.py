"""Description of a sandbox that its processes receive."""

from __future__ import annotations

from dataclasses import dataclass

SCOPED_SIGNALS_VERSION = 6
"""First version of Landlock that can restrict signals."""
MEGABYTE = 2**20


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Isolation and limits of a sandbox, sent as JSON. `SandboxSettings` describes the other fields."""

    landlock_version: int
    """The kernel's version of Landlock; 0 if it has none."""
    has_own_user: bool
    """Whether a sandbox runs as its own user, so that the kernel counts its processes separately from the agent's and
    does not let it signal them."""
    visible: list[str]
    preload: list[str]
    seed: int | None
    time_limit_s: float
    interrupt_grace_s: float
    memory_mb: int
    cpu_seconds: int
    max_processes: int
    max_open_files: int
    max_file_mb: int
    temp_dir_mb: int
    output_limit_bytes: int

    @property
    def scopes_signals(self) -> bool:
        """Whether Landlock contains signals."""
        return self.landlock_version >= SCOPED_SIGNALS_VERSION

    @property
    def signals_are_contained(self) -> bool:
        """Whether a signal to every process reaches only those of the sandbox."""
        return self.scopes_signals or self.has_own_user
