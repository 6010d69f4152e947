"""Copies of values that user code receives and may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 32
"""Depth to which nested containers are copied. Deeper containers are shared, since a container can contain itself."""


def copied(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """Return a value whose dicts and lists are copies. All other objects are shared."""
    copy = _COPIERS.get(type(value))  # pyright: ignore[reportUnknownArgumentType]
    return value if copy is None or not depth else copy(value, depth - 1)


def _copied_dict(values: dict[Any, Any], depth: int) -> dict[Any, Any]:
    return {
        key: copied(value, depth=depth) if type(value) in _COPIERS else value for key, value in values.items()
    }


def _copied_list(values: list[Any], depth: int) -> list[Any]:
    return [copied(value, depth=depth) if type(value) in _COPIERS else value for value in values]


_COPIERS: Mapping[type, Callable[[Any, int], Any]] = {dict: _copied_dict, list: _copied_list}
