"""Check that code does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agent_loop.testing.conformance import require

TICK_S = 0.005
MAX_BLOCK_S = 0.1
"""Longest time for which code may block the event loop."""
NUM_TRIALS = 3
"""Measurements before the check fails: other load on the machine may spoil one."""


async def require_no_blocking(work: Callable[[], Awaitable[object]]) -> str:
    """Fail the check if `work` blocks the event loop for `MAX_BLOCK_S`, and return the time that was measured."""
    blocks_s: list[float] = []
    while len(blocks_s) < NUM_TRIALS and min(blocks_s, default=MAX_BLOCK_S) >= MAX_BLOCK_S:
        blocks_s.append(await _longest_block_s(work))
    least = min(blocks_s)
    require(
        least < MAX_BLOCK_S,
        f"the event loop was blocked for {least:.2f} s; await the slow call, or run it in a thread",
    )
    return f"blocked the event loop for {1000 * least:.0f} ms at most"


async def _longest_block_s(work: Callable[[], Awaitable[object]]) -> float:
    clock = asyncio.get_running_loop().time
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = clock()
            await asyncio.sleep(TICK_S)
            longest = max(longest, clock() - before - TICK_S)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        await asyncio.sleep(0)
        await work()
        await asyncio.sleep(2 * TICK_S)
        ticking.cancel()
    return longest
