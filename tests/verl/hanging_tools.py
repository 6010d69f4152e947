"""A function tool that never returns."""

from __future__ import annotations

import asyncio

from verl.tools.function_tool import function_tool


@function_tool
async def wait_for_ever() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return ""
