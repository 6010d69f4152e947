"""CPU time and ids of this process and its descendants. Linux only; needs only the standard library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants.

    An ended process is counted with the process that waited for it.
    """
    stats = _stats()
    return sum(sum(map(int, stats[pid][11:15])) for pid in _tree(stats)) / TICKS_PER_S


def pids_of_tree() -> set[int]:
    """Return the ids of this process and its descendants."""
    return _tree(_stats())


def _stats() -> dict[int, list[str]]:
    """Return the fields of `/proc/PID/stat` after the name, for all processes."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # (the process has just ended)
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    return stats


def _tree(stats: Mapping[int, Sequence[str]]) -> set[int]:
    parents = {pid: int(fields[1]) for pid, fields in stats.items()}
    tree = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in tree and pid not in tree}:
        tree |= grown
    return tree
