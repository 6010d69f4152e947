"""Tools in the prompt, as plain functions that each side wraps. The stub model only calls `search`."""

from __future__ import annotations

REPLIES: dict[str, str] = {}
"""Results of `search` by query."""


async def search(query: str, max_results: int) -> str:
    """Searches the reference for passages that match a query and returns the best of them, the most relevant first.

    Args:
        query: What to look for, in a few plain words; operators are not understood.
        max_results: How many passages to return at most.
    """
    return REPLIES[query]


async def read_page(title: str, first_line: int, last_line: int) -> str:
    """Returns some lines of one page of the reference, exactly as they are written there.

    Args:
        title: The page's title, as `search` gives it.
        first_line: The first line to return; lines count from 1.
        last_line: The last line to return.
    """
    raise NotImplementedError


async def calculate(expression: str) -> str:
    """Evaluates an arithmetic expression and returns its value.

    Args:
        expression: The expression, with numbers, brackets and the operators + - * / alone.
    """
    raise NotImplementedError


TOOLS = (search, read_page, calculate)
