"""Formats for the page: JSON that browsers parse, and columns as plain arrays that JavaScript reads without copying."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.runtime.user_values import finite
from agent_loop.storage.schema import compute, pa

ALIGNMENT = 8
KINDS = {"float32": "f4", "float64": "f8", "int32": "i4", "uint8": "u1"}
NULL_CODE = -1
NULL_FLAG = 2


def packet(meta: Mapping[str, Any], columns: Mapping[str, Any]) -> bytes:
    """Return the bytes that `packets.js` reads: the length of the head (uint32, little-endian), the head, the arrays.

    Args:
        meta: Further values, which are sent as JSON.
        columns: Numpy arrays of `KINDS`, or Arrow columns of numbers, booleans or strings.
    """
    heads: list[dict[str, Any]] = []
    parts: list[bytes] = []
    offset = 0
    for name, column in columns.items():
        array, dictionary = _to_array(column)
        data = np.ascontiguousarray(array).tobytes()
        data += b"\0" * (-len(data) % ALIGNMENT)
        head = {"name": name, "kind": KINDS[array.dtype.name], "offset": offset, "length": len(array)}
        heads.append(head if dictionary is None else head | {"dictionary": dictionary})
        parts.append(data)
        offset += len(data)
    head_bytes = encode_json({"meta": dict(meta), "columns": heads})
    head_bytes += b" " * (-(4 + len(head_bytes)) % ALIGNMENT)
    return b"".join([struct.pack("<I", len(head_bytes)), head_bytes, *parts])


def is_sendable(kind: Any) -> bool:
    """Return whether Arrow columns of this type can be sent."""
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_string(kind)
    )


def _to_array(column: Any) -> tuple[NDArray[Any], list[str] | None]:
    """Return the values of a column, and the dictionary if they are codes of strings.

    Nulls become NaN, `NULL_FLAG` or `NULL_CODE`.
    """
    if isinstance(column, np.ndarray):
        return cast(NDArray[Any], column), None
    if pa.types.is_string(column.type):
        encoded = compute.dictionary_encode(column.combine_chunks())
        encoded = encoded if isinstance(encoded, pa.DictionaryArray) else encoded.combine_chunks()
        codes = compute.fill_null(encoded.indices, NULL_CODE).to_numpy(zero_copy_only=False)
        return codes.astype(np.int32), encoded.dictionary.to_pylist()
    if pa.types.is_boolean(column.type):
        return compute.fill_null(column.cast(pa.uint8()), NULL_FLAG).to_numpy(), None
    if pa.types.is_floating(column.type):
        return column.to_numpy().astype("float32" if column.type == pa.float32() else "float64"), None
    return _whole_numbers(column), None


def _whole_numbers(column: Any) -> NDArray[Any]:
    if column.null_count:
        return column.cast(pa.float64(), safe=False).to_numpy()
    values: NDArray[Any] = column.to_numpy()
    limits = np.iinfo(np.int32)
    fits = len(values) == 0 or (values.min() >= limits.min and values.max() <= limits.max)
    return values.astype(np.int32 if fits else np.float64)


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


def encode_json(value: Any) -> bytes:
    """Return a value as JSON in ASCII. Numbers that are not finite become null."""
    text = json.dumps(finite(value), allow_nan=False, default=str, separators=(",", ":"))
    return text.encode("ascii")
