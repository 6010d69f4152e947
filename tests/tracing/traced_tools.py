"""Tool that records its own spans."""

from __future__ import annotations

import asyncio

from agent_loop import function_tool
from agent_loop.tracing import rollout_trace_op


class Adder:
    """Adder whose method is traced."""

    @rollout_trace_op
    def sum_of(self, a: int, b: int) -> int:
        return a + b


@function_tool
async def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0.002)
    return Adder().sum_of(a, b)
