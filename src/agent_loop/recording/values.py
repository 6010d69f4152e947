"""Plain values and arrays as bytes, and back: a JSON text, then the arrays it names, packed one after the other."""

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
"""Begins the one key of a mapping that stands for packed bytes; see `pack`."""


class Unstorable(Exception):
    """A value has no form in the journal."""


def pack(value: Any) -> bytes:
    """Return a value as bytes.

    What JSON knows, NaN and half surrogates included, comes back as it is, but tuples come back as lists and keys as
    text. Arrays of numbers, bytes and Pillow images come back equal.

    Raises:
        Unstorable: Something in it is of another type; the message names it.
    """
    parts: list[bytes] = []

    def stand_in(item: Any) -> Any:
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
        # (without the check for circles, which costs more than the rest, a circle is a RecursionError)
        text = json.dumps(value, default=stand_in, check_circular=False, separators=(",", ":")).encode(
            "ascii"
        )
    except (TypeError, ValueError, RecursionError, OSError) as error:
        raise Unstorable(f"a value that JSON has no form for ({error})") from error
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def unpack(data: bytes) -> Any:
    """Return the value that `pack` was given.

    Raises:
        ValueError: These bytes are not from `pack`.
    """
    (length,) = _LENGTH.unpack_from(data)
    place = _LENGTH.size + length

    def take(num_bytes: int) -> bytes:
        nonlocal place
        place += num_bytes
        if place > len(data):
            raise ValueError("packed bytes are missing")
        return data[place - num_bytes : place]

    def read(mapping: dict[str, Any]) -> Any:
        # JSON is read from left to right, so the stand-ins come in the order of their bytes.
        if len(mapping) == 1:
            [(key, given)] = mapping.items()
            if key == f"{_MARK}array":
                dtype, shape = np.dtype(given[0]), tuple(given[1])
                num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                return np.frombuffer(take(num_bytes), dtype).reshape(shape).copy()
            if key == f"{_MARK}bytes":
                return take(given)
            if key == f"{_MARK}image":
                from PIL import Image  # late: text needs no Pillow

                return Image.open(io.BytesIO(take(given)))
        return mapping

    return json.loads(data[_LENGTH.size : _LENGTH.size + length], object_hook=read)


def digest(value: Any) -> str:
    """Return a digest of 16 hexadecimal digits, the same in every process. Objects of unknown types count by type."""
    try:
        text = value if isinstance(value, str) else _DIGESTED.encode(value)
    except BaseException:  # noqa: BLE001  (columns of rows may be objects, whose methods are foreign code)
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
    pillow: Any = sys.modules.get("PIL.Image")  # no image can exist before Pillow is imported
    return pillow is not None and isinstance(item, pillow.Image)
