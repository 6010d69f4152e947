"""What a process holds, counted before and after."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agent_loop.runtime.threads import num_idle_threads

SETTLE_S = 0.5
"""For threads and processes that are about to end."""
_FILES = Path("/proc/self/fd")
_PROCESSES = Path("/proc")


def count_held() -> dict[str, int]:
    """Threads, and where the system tells of them open files and child processes."""
    held = {"thread": threading.active_count() - num_idle_threads()}
    if _FILES.is_dir():
        held["open file"] = len(os.listdir(_FILES))
        held["process"] = _num_children()
    return held


async def grown_by(num: int, *, since: Mapping[str, int]) -> str | None:
    """Of what there is that many more than before, `SETTLE_S` later too; None if of nothing."""
    clock = asyncio.get_running_loop().time
    give_up = clock() + SETTLE_S
    while True:
        gc.collect()
        grown = next((kind for kind, held in count_held().items() if held - since[kind] >= num), None)
        if grown is None or clock() > give_up:
            return grown
        await asyncio.sleep(SETTLE_S / 10)


def _num_children() -> int:
    """Processes that this one started and that have not ended."""
    num = 0
    for stat in _PROCESSES.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parent = stat.read_text().rpartition(")")[2].split()[1]
            num += int(parent) == os.getpid()
    return num
