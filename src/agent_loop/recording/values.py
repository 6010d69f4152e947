"""Conversion of plain values and arrays to msgpack bytes and back, and digests of values."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from typing import Any, cast

import msgspec
import numpy as np

from agent_loop.files.plain_values import without_halves
from agent_loop.runtime.user_values import plain_value
from agent_loop.trajectory.codec import decode_array, encode_array

IMAGE_CODE = 2
"""Code of the msgpack extension type for Pillow images."""


class Unstorable(Exception):
    """The journal cannot store a value of this type."""


def pack(value: Any) -> bytes:
    """Return a value as bytes. Raise `Unstorable`, which names the type, if it is not a plain value.

    `unpack` returns plain values unchanged, including NaN, but tuples as lists, and unpaired surrogates as U+FFFD.
    Arrays of numbers, bytes and Pillow images are equal after unpacking.
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(_without_halves(value))
    except (TypeError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise Unstorable(f"a value that cannot be packed ({error})") from error


def unpack(data: bytes) -> Any:
    """Return the value that `pack` converted to these bytes. Raise ValueError for other bytes."""
    return _DECODER.decode(data)


def _encode(item: Any) -> Any:
    if isinstance(item, np.generic):
        return cast(Any, item).item()
    if isinstance(item, str):  # of a subclass
        return str.__str__(item)
    if _is_image(item):
        buffer = io.BytesIO()
        item.save(buffer, format="PNG")
        return msgspec.msgpack.Ext(IMAGE_CODE, buffer.getvalue())
    if type(item) is np.ndarray and not item.dtype.hasobject:
        return encode_array(item)
    raise Unstorable(f"a value of type {type(item).__module__}.{type(item).__qualname__}")


def _decode(code: int, data: memoryview) -> Any:
    if code == IMAGE_CODE:
        from PIL import Image  # Imported here, because records of text do not need Pillow.

        return Image.open(io.BytesIO(data))
    return decode_array(code, data).copy()


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        return without_halves(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_without_halves(key): _without_halves(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_without_halves(item) for item in cast("list[Any]", value)]
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_decode)


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
