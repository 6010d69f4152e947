"""Conversion of any value to valid JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from agent_loop.chat.sources import describe_source, without_pixels
from agent_loop.errors import DataError
from agent_loop.files.plain_values import without_halves
from agent_loop.runtime.user_values import plain_value
from agent_loop.types import Message, Row

MAX_ARRAY = 4096
"""Arrays with more numbers are replaced by a description."""
MAX_TEXT = 2000
"""Maximum characters of the `str` of an object of an unknown type."""


def to_json(value: Any) -> str:
    """Return any value as JSON.

    Arrays become lists, other types become a description, and numbers that are not finite become null.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))
    except BaseException:  # noqa: BLE001  (columns of rows may be objects, whose methods are foreign code)
        text = json.dumps(_plain(plain_value(value)), ensure_ascii=False, separators=(",", ":"))
    return without_halves(text)


def described(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with descriptions in place of their images. Parts without an image stay the same."""
    return [_described(message) for message in messages]


def described_row(row: Row) -> dict[str, Any]:
    """Return the columns of a row with descriptions in place of the images of its prompt."""
    columns = dict(row)
    if isinstance(columns.get("raw_prompt"), list):
        columns["raw_prompt"] = described(columns["raw_prompt"])
    return columns


def _described(message: Message) -> Message:
    try:
        return without_pixels(message)
    except DataError:
        return message


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, np.ndarray) and cast(Any, value).size <= MAX_ARRAY:
        return _plain(cast(Any, value).tolist())
    if isinstance(value, np.generic):
        return _plain(cast(Any, value).item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (np.ndarray, bytes)) or hasattr(value, "size"):
        return describe_source(value)
    return str(value)[:MAX_TEXT]
