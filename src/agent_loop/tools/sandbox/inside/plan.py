"""What the processes of the sandbox are told."""

from __future__ import annotations

from dataclasses import dataclass

SCOPED_SIGNALS_VERSION = 6
"""Of Landlock."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How sandboxes are made and what an interpreter may use. Travels as JSON."""

    mechanism: str
    """`namespaces`, bubblewrap's included; `landlock`; `limits`."""
    landlock_version: int
    """What the kernel knows of it; 0 where it is not used."""
    visible: list[str]
    """Files and folders of the host that are shown read-only, beside the system's and Python's own."""
    preload: list[str]
    """Modules that every interpreter begins with already imported."""
    seed: int | None
    """What `random` begins from; None for something else each time."""
    time_limit_s: float
    """Of one call."""
    interrupt_grace_s: float
    """From the interrupt at the time limit to the kill."""
    memory_bytes: int
    """Address space of one process, and resident memory of all processes of a sandbox together."""
    cpu_seconds: int
    """Of one process, over all calls."""
    max_processes: int
    """Threads included."""
    has_own_user: bool
    """Whether the kernel counts a sandbox's processes apart from those of the agent's user, and keeps its signals from
    them."""
    max_open_files: int
    max_file_bytes: int
    temp_dir_bytes: int
    output_bytes: int
    """So much of a call's output is kept: the first half and the last."""

    @property
    def namespaces(self) -> bool:
        """Whether sandboxes have files and process ids of their own; without, they write to a folder of the host's."""
        return self.mechanism == "namespaces"

    @property
    def scopes_signals(self) -> bool:
        """Whether Landlock keeps signals inside."""
        return self.landlock_version >= SCOPED_SIGNALS_VERSION

    @property
    def reaches_own_alone(self) -> bool:
        """Whether, without process ids of its own too, a signal to every process reaches the sandbox's alone."""
        return self.scopes_signals or (self.has_own_user and not self.namespaces)
