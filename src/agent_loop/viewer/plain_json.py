"""JSON that browsers can parse, for any stored values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast


def decode_json(text: Any) -> Any:
    """Return the value of a stored JSON document.

    Text that is not valid JSON is returned unchanged. NaN and infinities become text.
    """
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in cast(Iterable[Any], value)]
    return value if value is None or isinstance(value, str | int) else str(value)


def encode_json(value: Any) -> bytes:
    """Return a value as JSON in ASCII."""
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode("ascii")
