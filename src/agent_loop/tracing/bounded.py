"""Conversion of user values to JSON of bounded size."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np

MAX_CHARACTERS = 4000
MAX_ITEMS = 32
MAX_DEPTH = 4

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = _SHORT.maxlong = 200


def bounded(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """Return a JSON-compatible version of `value` whose size is bounded.

    Long texts and sequences are cut and end with their full length. Numbers that are not finite become None. Other
    objects become a short `repr`.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        is_short = len(value) <= MAX_CHARACTERS
        return value if is_short else f"{value[:MAX_CHARACTERS]}... ({len(value)} characters)"
    if isinstance(value, np.generic):
        return bounded(cast(Any, value).item(), depth=depth)
    if depth > 0 and isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value)
        kept = {str(key): bounded(item, depth=depth - 1) for key, item in islice(pairs.items(), MAX_ITEMS)}
        return kept if len(pairs) <= MAX_ITEMS else kept | {"...": f"{len(pairs)} in all"}
    if depth > 0 and _is_sequence(value):
        items = [bounded(item, depth=depth - 1) for item in islice(value, MAX_ITEMS)]
        return items if len(value) <= MAX_ITEMS else [*items, f"... ({len(value)} in all)"]
    return _SHORT.repr(value)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return cast(Any, value).ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))
