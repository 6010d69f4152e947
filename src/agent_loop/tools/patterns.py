"""Regular expressions that others wrote, matched in time that is linear in the text.

Patterns of JSON schemas are in ECMA-262's syntax. They are translated to that of RE2, which neither backtracks nor
recurses. RE2 has no look-around and no back-references, so patterns with those are refused.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

MAX_COUNT = 1000
"""RE2's limit on counts. A larger count is checked up to here."""
MAX_MEMORY = 4 << 20
"""Bytes of a compiled pattern."""
CELLS_PER_STEP = 400
"""RE2 takes up to 14 ns for each instruction of the pattern and character of the text: about 5 microseconds per step,
as long as a keyword of a schema takes."""

_TOKEN = re.compile(
    r"\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\u(?P<unit>[0-9a-fA-F]{4})"
    r"|(?P<script>\\[pP]\{(?:Script|sc)=)|(?P<escape>\\.)"
    r"|(?P<least>\{\d+)(?P<most>,\d*)?\}|(?P<bracket>[\[\]])|(?P<other>.)",
    re.DOTALL,
)


class PatternRefused(ValueError):
    """A pattern cannot be matched in bounded time, or is none."""


class Pattern:
    """One pattern, found anywhere in a text, as JSON schemas have it."""

    def __init__(self, pattern: str) -> None:
        """Raises: PatternRefused: RE2 cannot take the pattern."""
        re2: Any = import_module("re2")  # it has no type hints
        options: Any = re2.Options()
        options.max_mem, options.log_errors, options.never_capture = MAX_MEMORY, False, True
        try:
            self._compiled: Any = re2.compile(_translated(pattern), options)
        except re2.error as error:
            raise PatternRefused(_message(error)) from None
        except UnicodeEncodeError:
            raise PatternRefused("it holds half of a surrogate pair") from None
        self._size = int(self._compiled.programsize)

    def steps(self, text: str) -> int:
        """Time limit of a search, in steps of about 5 microseconds."""
        return self._size * len(text) // CELLS_PER_STEP

    def is_in(self, text: str) -> bool:
        """Return whether the text has a match."""
        if not text.isascii():
            text = text.encode(
                errors="replace"
            ).decode()  # RE2 reads UTF-8, which has no half surrogate pairs
        return self._compiled.search(text) is not None


@lru_cache(maxsize=4096)
def pattern_of(pattern: str) -> Pattern:
    """Return the compiled pattern.

    Raises:
        PatternRefused: RE2 cannot take it.
    """
    return Pattern(pattern)


def _message(error: Exception) -> str:
    reason: Any = error.args[0] if error.args else ""
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)


def _translated(pattern: str) -> str:
    """Rewrite what ECMA-262 writes differently: code points, names of scripts, brackets in classes, large counts."""
    parts: list[str] = []
    is_in_class = False
    for token in _TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token[0]
        if kind == "code" or kind == "unit":
            text = rf"\x{{{token[kind]}}}"
        elif kind == "script":
            text = text.partition("{")[0] + "{"
        elif kind in ("least", "most") and not is_in_class:
            text = _count(token)
        elif kind == "bracket" and is_in_class and text == "[":
            text = r"\["
        elif kind == "bracket":
            is_in_class = text == "["
        parts.append(text)
    return "".join(parts)


def _count(token: re.Match[str]) -> str:
    least, most = int(token["least"][1:]), token["most"]
    if most is None:
        return f"{{{least}}}" if least <= MAX_COUNT else f"{{{MAX_COUNT},}}"
    if most == "," or int(most[1:]) > MAX_COUNT:
        return f"{{{min(least, MAX_COUNT)},}}"
    return token[0]
