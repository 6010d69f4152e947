"""Short form of a traceback: the last frame of the user's code, and the exception."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

_FRAME = re.compile(r' *File "(?P<file>[^"]+)", line (?P<line>\d+)')
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
MAX_ERROR_LINES = 2
"""Lines of the exception's message."""


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
