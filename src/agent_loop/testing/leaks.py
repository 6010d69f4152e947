"""Find what an object or the process still holds after a trajectory has ended."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from agent_loop.runtime.threads import num_idle_threads
from agent_loop.testing.conformance import require

SETTLE_S = 0.5
"""Time in which threads and processes may still end."""
MAX_DEPTH = 4
"""Depth of nested containers that is searched for an instance id."""
_OPEN_FILES = Path("/proc/self/fd")
_PROCESSES = Path("/proc")


def require_forgotten(instance_id: str, owner: object, *, after: str) -> None:
    """Fail the check if an attribute of `owner` still holds an instance id.

    Args:
        after: The method that should have removed the id, as in `release`.
    """
    for name, value in vars(owner).items():
        require(not _holds(value, instance_id, depth=0), f"its id is still in self.{name} after {after}")


def count_resources() -> dict[str, int]:
    """Count the threads of this process and, on Linux, its open files and child processes."""
    counts = {"thread": threading.active_count() - num_idle_threads()}
    if _OPEN_FILES.is_dir():
        counts["open file"] = len(os.listdir(_OPEN_FILES))
        counts["process"] = _num_children()
    return counts


async def find_leak(num: int, *, since: Mapping[str, int]) -> str | None:
    """Return the kind of resource that grew by at least `num` and stays so for `SETTLE_S`, or None.

    Args:
        since: Counts from before, as `count_resources` returned them.
    """
    clock = asyncio.get_running_loop().time
    give_up = clock() + SETTLE_S
    while True:
        gc.collect()
        leaked = next((kind for kind, held in count_resources().items() if held - since[kind] >= num), None)
        if leaked is None or clock() > give_up:
            return leaked
        await asyncio.sleep(SETTLE_S / 10)


def _holds(value: Any, instance_id: str, *, depth: int) -> bool:
    if isinstance(value, str):
        return value == instance_id
    if depth == MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value)
        return any(_holds(each, instance_id, depth=depth + 1) for pair in items.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds(each, instance_id, depth=depth + 1) for each in cast("list[Any]", value))
    return False


def _num_children() -> int:
    """Count the running child processes of this process."""
    num = 0
    for stat in _PROCESSES.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended since
            parent = stat.read_text().rpartition(")")[2].split()[1]
            num += int(parent) == os.getpid()
    return num
