"""Conditions of `[ ... ]` and `[[ ... ]]` in a shell script."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_ON_ONE: Mapping[str, Callable[[str], bool]] = {
    "-z": lambda text: not text,
    "-n": bool,
    "-v": bool,
    "-d": lambda text: Path(text).is_dir(),
    "-f": lambda text: Path(text).is_file(),
    "-e": lambda text: Path(text).exists(),
    "-s": lambda text: Path(text).is_file(),
    "-x": lambda text: Path(text).exists(),
    "-r": lambda text: Path(text).exists(),
}
_ON_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_ON_TEXTS: Mapping[str, Callable[[str, str], bool]] = {
    "=": fnmatch.fnmatchcase,
    "==": fnmatch.fnmatchcase,
    "!=": lambda a, b: not fnmatch.fnmatchcase(a, b),
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


def holds(words: Sequence[str]) -> bool:
    """Return whether a condition holds. An unknown one does not."""
    for operator, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if operator in words:
            parts: list[list[str]] = [[]]
            for word in words:
                if word == operator:
                    parts.append([])
                else:
                    parts[-1].append(word)
            return combine(holds(part) for part in parts)
    if words[:1] == ["!"]:
        return not holds(words[1:])
    if words[:1] == ["("] and words[-1:] == [")"]:
        return holds(words[1:-1])
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in _ON_ONE:
        return _ON_ONE[words[0]](words[1])
    if len(words) == 3:
        return _compare(*words)
    return False


def _compare(left: str, operator: str, right: str) -> bool:
    if operator in _ON_TEXTS:
        return _ON_TEXTS[operator](left, right)
    if operator in _ON_NUMBERS:
        numbers = [int(text) if re.fullmatch(r"-?\d+", text) else 0 for text in (left, right)]
        return _ON_NUMBERS[operator](*numbers)
    if operator == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return False
    return False
