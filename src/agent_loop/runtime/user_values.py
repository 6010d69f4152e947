"""Conversion of values from user code to plain values, which every file format and every process can hold."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from agent_loop.runtime.describe import safe_repr, type_name
from agent_loop.runtime.incidents import record_incident
from agent_loop.trajectory.incidents import IncidentKind

MAX_DEPTH = 32
"""Depth of nested containers. JSON readers and pickle recurse into them."""
MAX_VALUES = 100_000
"""Number of values in one mapping, including nested values."""
MAX_TEXT = 1_000_000
"""Number of characters of one string."""
MAX_INTEGER = 2**64
"""Larger integers become strings, since columns and most readers of JSON hold 64 bits."""
MAX_DIGITS_BITS = 4096
"""Integers with more bits are replaced by a description of their size."""
MAX_NOTES = 5
"""Number of incidents per mapping. One more incident counts the rest."""

_KEPT = (type(None), bool, float, bytes)
_WRITTEN_AS_TEXT = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    uuid.UUID,
    complex,
)


def plain_mapping(value: Mapping[Any, Any], *, where: str) -> dict[str, Any]:
    """Return a copy of a user's mapping as a dict of plain values.

    Strings, numbers, booleans, None, bytes, arrays, tensors and images are kept. Lists, tuples and mappings are copied,
    and keys become strings. Data classes, pydantic models, structs and named tuples become dicts, enums become their
    values, and dates, paths and similar objects become strings. Any other object is replaced by its description in
    angle brackets, and recorded on the trajectory (`IncidentKind.UNSTORABLE_VALUE`).

    Args:
        where: Origin of the mapping, for the incident, such as "extra of tool 'search'".
    """
    if type(value) is dict and not value:
        return {}
    reader = _Converter()
    read = reader.read(value, path="", depth=0)
    reader.note(where)
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {"value": read}


def plain_value(value: Any) -> Any:
    """Return a value converted as in `plain_mapping`, without recording incidents."""
    return _Converter().read(value, path="", depth=0)


def finite(value: Any) -> Any:
    """Return a plain value with None in place of each number that is not finite, as JSON requires."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Converter:
    """Converts one value and collects descriptions of the parts that were lost."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self._num_values = 0
        self._open: set[int] = set()
        """Ids of the containers that enclose the current value."""

    def note(self, where: str) -> None:
        """Record the lost parts on the running trajectory."""
        for detail in self.lost[:MAX_NOTES]:
            record_incident(IncidentKind.UNSTORABLE_VALUE, f"{where}: {detail}")
        if len(self.lost) > MAX_NOTES:
            rest = f"{where}: {len(self.lost) - MAX_NOTES} more values"
            record_incident(IncidentKind.UNSTORABLE_VALUE, rest)

    def read(self, value: Any, *, path: str, depth: int) -> Any:
        kind = cast(Any, type(value))
        self._num_values += 1
        if kind in _KEPT:
            return value
        if kind is str:
            return value if len(value) <= MAX_TEXT else self._cut(value, path=path)
        if kind is int:
            return value if -MAX_INTEGER < value < MAX_INTEGER else self._large_integer(value, path=path)
        if self._num_values > MAX_VALUES:
            return self._lose(f"more than {MAX_VALUES} values", path=path)
        if depth >= MAX_DEPTH:
            return self._lose(f"nested more than {MAX_DEPTH} deep", path=path)
        if id(value) in self._open:
            return self._lose("a container within itself", path=path)
        self._open.add(id(value))
        try:
            return self._read_other(value, kind, path=path, depth=depth)
        except BaseException:  # noqa: BLE001  (its methods are user code; Ctrl-C arrives otherwise)
            return self._lose(f"{type_name(kind)} object that cannot be read", path=path)
        finally:
            self._open.discard(id(value))

    def _read_other(self, value: Any, kind: Any, *, path: str, depth: int) -> Any:
        if kind is np.ndarray or _is_trusted(kind):
            if kind is np.ndarray and value.dtype.hasobject:
                return self._items(value.tolist(), path=path, depth=depth)
            return value
        if issubclass(kind, np.generic):
            return self.read(np.generic.item(value), path=path, depth=depth)
        if issubclass(kind, enum.Enum):
            return self.read(value.value, path=path, depth=depth)
        # The methods of the base classes are called, since those of a subclass are user code.
        if issubclass(kind, str):
            return self.read(str.__str__(value), path=path, depth=depth)
        if issubclass(kind, int):
            return self.read(int.__int__(value), path=path, depth=depth)
        if issubclass(kind, float):
            return float.__float__(value)
        if issubclass(kind, dict):
            return self._pairs(_DICT.items(value), path=path, depth=depth)
        for base in _SEQUENCES:
            if issubclass(kind, base):
                items = base.__iter__(value)
                names = getattr(kind, "_fields", None)  # of a named tuple
                if base is tuple and names is not None:
                    return self._pairs(zip(names, items, strict=False), path=path, depth=depth)
                read = self._items(items, path=path, depth=depth)
                return tuple(read) if base is tuple else read
        if issubclass(kind, (bytearray, memoryview)):
            return bytes(value)
        if issubclass(kind, _WRITTEN_AS_TEXT):
            return self.read(str(value), path=path, depth=depth)
        names = _field_names(kind)
        if names is not None:
            pairs = ((name, getattr(value, name)) for name in names)
            return self._pairs(pairs, path=path, depth=depth)
        if issubclass(kind, Mapping):
            return self._pairs(cast("Mapping[Any, Any]", value).items(), path=path, depth=depth)
        return self._lose(f"{type_name(kind)} object", path=path)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], *, path: str, depth: int) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for key, value in pairs:
            name = key if type(key) is str and len(key) <= MAX_TEXT else self._key(key, path=path)
            read[name] = self.read(value, path=f"{path}.{name}" if path else name, depth=depth + 1)
            if self._num_values > MAX_VALUES:
                self._leave_out_rest()
                break
        return read

    def _items(self, items: Iterable[Any], *, path: str, depth: int) -> list[Any]:
        read: list[Any] = []
        for number, item in enumerate(items):
            read.append(self.read(item, path=f"{path}[{number}]", depth=depth + 1))
            if self._num_values > MAX_VALUES:
                self._leave_out_rest()
                break
        return read

    def _key(self, key: Any, *, path: str) -> str:
        read = self.read(key, path=f"a key of {path or 'it'}", depth=MAX_DEPTH - 2)
        return read if isinstance(read, str) else safe_repr(read)

    def _cut(self, text: str, *, path: str) -> str:
        self.lost.append(f"{path or 'it'} has {len(text)} characters and was cut to {MAX_TEXT}")
        return text[:MAX_TEXT]

    def _large_integer(self, value: int, *, path: str) -> str:
        num_bits = int.bit_length(value)
        if num_bits <= MAX_DIGITS_BITS:
            self.lost.append(f"{path or 'it'} is an integer of {num_bits} bits and was kept as text")
            return str(value)
        return self._lose(f"integer of {num_bits} bits", path=path)

    def _leave_out_rest(self) -> None:
        what = f"it has more than {MAX_VALUES} values, and the rest is left out"
        if what not in self.lost:
            self.lost.append(what)

    def _lose(self, what: str, *, path: str) -> str:
        self.lost.append(f"{path[:200] or 'it'} is not storable ({what})")
        return f"<{what}>"


def _field_names(kind: Any) -> list[str] | None:
    """Return the field names of a data class, a msgspec struct or a pydantic model; None for any other class."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    for attribute in ("__struct_fields__", "model_fields"):
        names: Any = getattr(kind, attribute, None)
        if isinstance(names, (tuple, dict)):
            return list(cast("Iterable[str]", names))
    return None


def _is_trusted(kind: Any) -> bool:
    """Return whether this is the class of tensors or of Pillow images."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and kind is getattr(torch, "Tensor", None):
        return True
    pillow: Any = sys.modules.get("PIL.Image")
    return pillow is not None and issubclass(kind, pillow.Image)


_DICT: Any = dict
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset)
