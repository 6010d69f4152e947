"""The CPU time of a process and of all below it. Linux; needs the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds() -> float:
    """Of this process and all that run below it. What has ended is counted with whoever waited for it."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS_PER_S
    tree = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in tree and pid not in tree}:
        tree |= grown
    return sum(used.get(pid, 0.0) for pid in tree)
