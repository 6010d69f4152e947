"""Text about errors and values of user code, for messages and logs. None of these functions raises."""

from __future__ import annotations

import reprlib
from typing import Any, cast


def describe_error(error: BaseException) -> str:
    """Return type and message of an exception on one line, even if the exception's own methods fail."""
    message, name = one_line(safe_str(error), max_length=500), type_name(type(error))
    return f"{name}: {message}" if message else name


def describe_value(value: Any) -> str:
    """Return the repr and the type of a value on one line, even if the value's own methods fail."""
    text = one_line(safe_repr(value), max_length=80)
    return text if value is None else f"{text} ({type_name(type(value))})"


def one_line(text: str, *, max_length: int) -> str:
    """Return the text with each run of white space as one space, truncated to `max_length` characters."""
    text = " ".join(text[: 8 * max_length].split())
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def safe_repr(value: Any, *, max_length: int = 200) -> str:
    """Return the repr of a value, truncated; a placeholder if its repr raises."""
    kind = cast(Any, type(value))
    try:
        if kind in (str, bytes):
            return repr(value if len(value) <= max_length else value[:max_length])
        text: Any = _SHORT.repr(value)
        return str.__str__(text)[:max_length]
    except BaseException:  # noqa: BLE001  (repr is user code; KeyboardInterrupt is not how Ctrl-C arrives)
        return f"<{type_name(kind)} object whose repr fails>"


def safe_str(value: Any, *, max_length: int = 2000) -> str:
    """Return `str(value)`, truncated; an empty string if it raises."""
    try:
        return str.__str__(str(value))[:max_length]
    except BaseException:  # noqa: BLE001  (as in safe_repr)
        return ""


def type_name(kind: Any) -> str:
    """Return the name of a class, even if its metaclass overrides attribute access."""
    try:
        return str.__str__(type.__dict__["__name__"].__get__(kind))
    except BaseException:  # noqa: BLE001  (as in safe_repr)
        return "object"


def _make_short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlevel = 4
    short.maxdict = short.maxlist = short.maxtuple = short.maxset = short.maxfrozenset = 20
    short.maxstring = short.maxother = short.maxlong = 200
    return short


_SHORT = _make_short()
