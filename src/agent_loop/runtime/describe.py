"""Text about errors and values of user code, for messages and logs."""

from __future__ import annotations

import re
import reprlib
import sysconfig
from pathlib import Path
from typing import Any

MAX_ERROR_LINES = 2
"""Lines of the exception's message in a short traceback."""


def describe_error(error: BaseException) -> str:
    """Return type and message of an exception on one line."""
    name = type(error).__name__
    try:
        message = one_line(str(error), max_length=500)
    except Exception:  # noqa: BLE001  (a user's exception class may have a bug in __str__)
        message = ""
    return f"{name}: {message}" if message else name


def describe_value(value: Any) -> str:
    """Return the repr and the type of a value on one line."""
    text = one_line(short_repr(value), max_length=80)
    return text if value is None else f"{text} ({type(value).__name__})"


def one_line(text: str, *, max_length: int) -> str:
    """Return the text with each run of white space as one space, truncated to `max_length` characters."""
    text = " ".join(text[: 8 * max_length].split())
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def short_repr(value: Any, *, max_length: int = 200) -> str:
    """Return the repr of a value, truncated; a placeholder if its repr raises an exception."""
    if isinstance(value, (str, bytes)):
        return repr(value[:max_length])
    try:
        return _SHORT.repr(value)[:max_length]
    except ValueError:  # an int with too many digits
        return f"<a huge {type(value).__name__}>"


def short_traceback(text: str) -> list[str]:
    """Return the last frame of user code in a formatted traceback, and the lines of the exception after it.

    Without a frame outside of this package and the libraries, the frame is the last one. The markers below a line of
    code are left out.
    """
    lines = text.rstrip().splitlines()
    starts = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not starts:
        return lines[-MAX_ERROR_LINES:]
    users = [number for number in starts if _is_users(lines[number])]
    start = (users or starts)[-1]
    end = next(
        (number for number in range(starts[-1] + 1, len(lines)) if not lines[number].startswith(" ")), None
    )
    frame = [lines[start]]
    if start + 1 < len(lines) and lines[start + 1].startswith("    ") and start + 1 not in starts:
        frame.append(lines[start + 1])
    return frame + ([] if end is None else lines[end : end + MAX_ERROR_LINES])


def _is_users(line: str) -> bool:
    found = _FRAME.match(line)
    file = "" if found is None else found["file"]
    return not file.startswith(("<", _PACKAGE)) and not any(
        file.startswith(f"{each}/") for each in _LIBRARIES
    )


def _make_short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlevel = 4
    short.maxdict = short.maxlist = short.maxtuple = short.maxset = short.maxfrozenset = 20
    short.maxstring = short.maxother = short.maxlong = 200
    return short


_SHORT = _make_short()
_FRAME = re.compile(r' *File "(?P<file>[^"]+)", line (?P<line>\d+)')
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
