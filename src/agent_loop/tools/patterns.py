"""Untrusted regular expressions, matched in time linear in the length of the text.

Patterns of JSON schemas use the syntax of ECMA-262. They are translated to the syntax of RE2, which neither backtracks
nor recurses. RE2 has no look-around and no back-references, so patterns that use them are refused.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

MAX_COUNT = 1000
"""RE2's limit on repetition counts. A larger count is enforced up to this value."""
MAX_MEMORY = 4 << 20
"""Maximum size of a compiled pattern in bytes."""
CELLS_PER_STEP = 400
"""Pairs of pattern instruction and text character that count as one step.

RE2 takes up to 14 ns per pair, which makes a step about 5 microseconds: as long as one keyword of a schema takes."""

_TOKEN = re.compile(
    r"\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\u(?P<unit>[0-9a-fA-F]{4})"
    r"|(?P<script>\\[pP]\{(?:Script|sc)=)|(?P<escape>\\.)"
    r"|(?P<least>\{\d+)(?P<most>,\d*)?\}|(?P<bracket>[\[\]])|(?P<other>.)",
    re.DOTALL,
)


class PatternRefused(ValueError):
    """The pattern is invalid, or cannot be matched in bounded time."""


class Pattern:
    """Compiled pattern that may match anywhere in a text, as in JSON schemas.

    Raises:
        PatternRefused: RE2 does not accept the pattern.
    """

    def __init__(self, pattern: str) -> None:
        re2: Any = import_module("re2")  # it has no type hints
        options: Any = re2.Options()
        options.max_mem, options.log_errors, options.never_capture = MAX_MEMORY, False, True
        try:
            self._compiled: Any = re2.compile(_translated(pattern), options)
        except re2.error as error:
            raise PatternRefused(_message(error)) from None
        except UnicodeEncodeError:
            raise PatternRefused("it contains half of a surrogate pair") from None
        self._size = int(self._compiled.programsize)

    def steps(self, text: str) -> int:
        """Return the longest duration of a search, in steps of about 5 microseconds."""
        return self._size * len(text) // CELLS_PER_STEP

    def is_in(self, text: str) -> bool:
        """Return whether the pattern matches anywhere in the text."""
        if not text.isascii():
            text = text.encode(
                errors="replace"
            ).decode()  # RE2 reads UTF-8, which has no half surrogate pairs
        return self._compiled.search(text) is not None


@lru_cache(maxsize=4096)
def pattern_of(pattern: str) -> Pattern:
    """Return the compiled pattern.

    Raises:
        PatternRefused: RE2 does not accept the pattern.
    """
    return Pattern(pattern)


def _message(error: Exception) -> str:
    reason: Any = error.args[0] if error.args else ""
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)


def _translated(pattern: str) -> str:
    """Rewrite ECMA-262 syntax that differs in RE2: code points, script names, brackets in classes, large counts."""
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
