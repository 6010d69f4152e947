"""Codec of records such as completions, segments and incidents, for journals, messages and JSON lines.

A record is a msgspec struct or a data class. The codec reads the fields from the class, so a new field needs no code
here.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Struct

from agent_loop.types import TokenOutput

RecordT = TypeVar("RecordT")
ARRAY_CODE = 1
"""Code of the msgpack extension type for arrays."""


def to_plain(value: Any) -> Any:
    """Return a record, or a sequence of records, as mappings and lists by the names of the fields.

    Arrays, mappings and all other values stay as they are.
    """
    if isinstance(value, Struct):
        return {name: to_plain(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in cast("list[Any]", value)]
    return value


def from_plain(plain: Any, kind: type[RecordT]) -> RecordT:
    """Return the record that `to_plain` was given.

    Raises:
        ValueError: The values are not those of a `kind`.
    """
    return msgspec.convert(plain, kind, dec_hook=_as_declared)


def encode_completion(output: TokenOutput) -> bytes:
    """Return a completion as msgpack bytes."""
    return _ENCODER.encode(output)


def decode_completion(data: bytes) -> TokenOutput:
    """Return the completion that `encode_completion` was given."""
    return _DECODER.decode(data)


def _as_declared(kind: Any, value: Any) -> Any:
    """Accept an array for a field of arrays. msgspec itself knows no arrays."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} instead of an array")
    return cast(Any, value)


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"no form for a {type(value).__name__}")
    array = cast("np.ndarray[Any, Any]", value)
    header = msgspec.msgpack.encode((array.dtype.str, array.shape))
    return msgspec.msgpack.Ext(ARRAY_CODE, bytes([len(header)]) + header + array.tobytes())


def _decode_array(code: int, data: memoryview) -> Any:
    if code != ARRAY_CODE:
        raise NotImplementedError(f"extension type {code}")
    end = 1 + data[0]
    dtype, shape = msgspec.msgpack.decode(data[1:end], type=tuple[str, tuple[int, ...]])
    return np.frombuffer(data[end:], np.dtype(dtype)).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(TokenOutput, dec_hook=_as_declared, ext_hook=_decode_array)
