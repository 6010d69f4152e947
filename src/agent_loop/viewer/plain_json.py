"""JSON that a browser reads, whatever was stored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast


def decoded(text: Any) -> Any:
    """A stored JSON document; text that is none stays as it is, numbers that JSON lacks become text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def finite(value: Any) -> Any:
    """The same value with null in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in cast(Iterable[Any], value)]
    return value if value is None or isinstance(value, str | int) else str(value)


def as_bytes(value: Any) -> bytes:
    """A reply in JSON."""
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode("ascii")
