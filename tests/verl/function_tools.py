"""Function tools of a user of verl: one that answers, and one that never returns."""

from __future__ import annotations

import asyncio

from verl.tools.function_tool import function_tool


@function_tool
def shout(text: str) -> str:
    """Return a text in capitals.

    Args:
        text: The text.
    """
    return text.upper()


@function_tool
async def wait_for_ever() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return ""
