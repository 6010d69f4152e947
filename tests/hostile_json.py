"""Requests with invalid parts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

DEEP: Any = json.loads("[" * 150 + "]" * 150)
NUMBERS = (True, 7, -1, 0, 10**20, 10**300, 1.5, 1e308)
TEXTS = ("", "x", "\x00", "x" * 5000, "<|im_end|>")
LISTS = ([], [None], [7], [[]], ["x"], [{}], DEEP)
MAPPINGS = ({}, {"": None}, {"type": 7}, {"type": ["text"], "text": {}})
PARTS = (
    {"type": "text", "text": 7},
    {"type": "tool_result", "content": 7},
    {"type": "image", "source": {"type": "base64", "media_type": 7, "data": []}},
    {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}},
)
VALUES: tuple[Any, ...] = (None, *NUMBERS, *TEXTS, *LISTS, *MAPPINGS, *([part] for part in PARTS))
INVALID = (
    b"",
    b"null",
    b"7",
    b"[]",
    b'"x"',
    b"{",
    b"NaN",
    b'{"model": NaN}',
    b'{"model": "\\ud800"}',
    b"\xff\xfe",
)
LARGE = (b"[" * 100_000, b'{"a":' * 100_000, b'{"model": ' + b"9" * 5000 + b"}", b'{"max_tokens": 1e999}')
RAW = (*INVALID, b'{"\\ud800": 1}', *LARGE)
"""Bodies that are not valid JSON, or that contain values which no field accepts."""


def mutated(body: Any) -> Iterator[Any]:
    """Yield copies of a body, each with one part removed or replaced by one of `VALUES`."""
    for path in _paths(body):
        for value in VALUES:
            yield _with(body, path, value)
        if path:
            yield _with(body, path, ...)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, (*path, index))


def _with(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(body)
    parent = changed
    for part in path[:-1]:
        parent = parent[part]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return changed
