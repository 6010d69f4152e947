"""Conversion of user values to JSON of bounded size."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np

from agent_loop.runtime.describe import safe_repr

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
    try:
        return _bounded(value, depth)
    except BaseException:  # noqa: BLE001  (columns of rows may be objects, whose methods are user code)
        return safe_repr(value)


def _bounded(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return (
            value
            if len(value) <= MAX_CHARACTERS
            else f"{value[:MAX_CHARACTERS]}... ({len(value)} characters)"
        )
    if isinstance(value, np.generic):
        return bounded(cast(Any, value).item(), depth=depth)
    if depth > 0 and isinstance(value, Mapping):
        return _mapping(cast(Mapping[Any, Any], value), depth=depth - 1)
    if depth > 0 and _is_sequence(value):
        return _sequence(value, depth=depth - 1)
    return _SHORT.repr(value)


def _mapping(values: Mapping[Any, Any], *, depth: int) -> dict[str, Any]:
    kept = {str(key): bounded(value, depth=depth) for key, value in islice(values.items(), MAX_ITEMS)}
    return kept if len(values) <= MAX_ITEMS else kept | {"...": f"{len(values)} in all"}


def _sequence(values: Sequence[Any], *, depth: int) -> list[Any]:
    kept = [bounded(value, depth=depth) for value in islice(values, MAX_ITEMS)]
    return kept if len(values) <= MAX_ITEMS else [*kept, f"... ({len(values)} in all)"]


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return cast(Any, value).ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))
