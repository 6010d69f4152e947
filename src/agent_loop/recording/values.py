"""Conversion of plain values and arrays to bytes and back. The bytes are a JSON text, then the arrays in order."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import sys
from typing import Any, cast

import numpy as np

from agent_loop.runtime.user_values import plain_value

_LENGTH = struct.Struct("<I")
_MARK = "\0"
"""First character of the only key of a placeholder. A placeholder is a mapping that replaces packed bytes."""


class Unstorable(Exception):
    """The journal cannot store a value of this type."""


def pack(value: Any) -> bytes:
    """Return a value as bytes.

    `unpack` returns JSON values unchanged, including NaN and unpaired surrogates. It returns tuples as lists, and keys
    as text. Arrays of numbers, bytes and Pillow images are equal after unpacking.

    Raises:
        Unstorable: The value contains a value of another type, which the message names.
    """
    parts: list[bytes] = []

    def placeholder(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            array = cast(Any, np.ascontiguousarray(cast(Any, item)))
            if array.dtype.hasobject:
                raise Unstorable("an array of objects")
            parts.append(array.tobytes())
            return {f"{_MARK}array": [array.dtype.str, list(cast(Any, item).shape)]}
        if isinstance(item, np.generic):
            return cast(Any, item).item()
        if isinstance(item, (bytes, bytearray)):
            parts.append(bytes(item))
            return {f"{_MARK}bytes": len(item)}
        if _is_image(item):
            buffer = io.BytesIO()
            item.save(buffer, format="PNG")
            parts.append(buffer.getvalue())
            return {f"{_MARK}image": len(parts[-1])}
        raise Unstorable(f"a value of type {type(item).__module__}.{type(item).__qualname__}")

    try:
        # The check for circular references is slower than everything else. Without it, they raise a RecursionError.
        text = json.dumps(value, default=placeholder, check_circular=False, separators=(",", ":")).encode(
            "ascii"
        )
    except (TypeError, ValueError, RecursionError, OSError) as error:
        raise Unstorable(f"a value that JSON cannot represent ({error})") from error
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def unpack(data: bytes) -> Any:
    """Return the value that `pack` converted to these bytes."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length

    def take(num_bytes: int) -> bytes:
        nonlocal end
        end += num_bytes
        if end > len(data):
            raise ValueError("packed bytes are missing")
        return data[end - num_bytes : end]

    def read(mapping: dict[str, Any]) -> Any:
        # JSON is parsed from left to right, so the placeholders are in the order of their bytes.
        if len(mapping) == 1:
            [(key, given)] = mapping.items()
            if key == f"{_MARK}array":
                dtype, shape = np.dtype(given[0]), tuple(given[1])
                num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                return np.frombuffer(take(num_bytes), dtype).reshape(shape).copy()
            if key == f"{_MARK}bytes":
                return take(given)
            if key == f"{_MARK}image":
                from PIL import Image  # Imported here, because records of text do not need Pillow.

                return Image.open(io.BytesIO(take(given)))
        return mapping

    return json.loads(data[_LENGTH.size : _LENGTH.size + length], object_hook=read)


def digest(value: Any) -> str:
    """Return a digest of 16 hexadecimal digits, the same in every process.

    An object of an unknown type is represented by the name of its type.
    """
    try:
        text = value if isinstance(value, str) else _DIGESTED.encode(value)
    except BaseException:  # noqa: BLE001  (columns of rows may be objects, whose methods are user code)
        text = _DIGESTED.encode(plain_value(value))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _fingerprint(item: Any) -> Any:
    if isinstance(item, np.generic):
        return cast(Any, item).item()
    if isinstance(item, np.ndarray):
        array = cast(Any, item)
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return [array.dtype.str, list(array.shape), hashlib.blake2b(content, digest_size=8).hexdigest()]
    if isinstance(item, (bytes, bytearray)):
        return [len(item), hashlib.blake2b(item, digest_size=8).hexdigest()]
    if _is_image(item):
        return [item.mode, item.size, hashlib.blake2b(item.tobytes(), digest_size=8).hexdigest()]
    return f"{type(item).__module__}.{type(item).__qualname__}"


_DIGESTED = json.JSONEncoder(default=_fingerprint, check_circular=False, separators=(",", ":"))


def _is_image(item: Any) -> bool:
    pillow: Any = sys.modules.get("PIL.Image")  # No image can exist before Pillow is imported.
    return pillow is not None and isinstance(item, pillow.Image)
