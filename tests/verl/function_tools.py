"""Function tool of a user of verl."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def shout(text: str) -> str:
    """Return a text in capitals.

    Args:
        text: The text.
    """
    return text.upper()
