"""What the processes of the sandbox are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """How sandboxes are made and what an interpreter may use. Travels as JSON."""

    namespaces: bool
    """Each sandbox gets namespaces of its own; without, limits alone."""
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
    has_own_count: bool
    """Whether the kernel counts a sandbox's processes apart from those of the agent's user."""
    max_open_files: int
    max_file_bytes: int
    temp_dir_bytes: int
    output_bytes: int
    """So much of a call's output is kept: the first half and the last."""
