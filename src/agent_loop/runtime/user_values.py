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

from agent_loop.runtime.describe import short_repr
from agent_loop.runtime.incidents import record_incident
from agent_loop.trajectory.incidents import IncidentKind

MAX_DEPTH = 32
"""Depth of nested containers. JSON readers and pickle recurse into them."""
MAX_TEXT = 1_000_000
"""Number of characters of one string."""
MAX_INTEGER = 2**64
"""Larger integers are lost, since columns and most readers of JSON hold 64 bits."""
MAX_NOTES = 5
"""Number of incidents per mapping. One more incident counts the rest."""

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
    if not value:
        return {}
    reader = _Converter()
    read = reader.read(value, path="", depth=0)
    for detail in reader.lost[:MAX_NOTES]:
        record_incident(IncidentKind.UNSTORABLE_VALUE, f"{where}: {detail}")
    if len(reader.lost) > MAX_NOTES:
        rest = f"{where}: {len(reader.lost) - MAX_NOTES} more values"
        record_incident(IncidentKind.UNSTORABLE_VALUE, rest)
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
        self._open: set[int] = set()
        """Ids of the containers that enclose the current value."""

    def read(self, value: Any, *, path: str, depth: int) -> Any:
        if value is None or isinstance(value, (bool, bytes)):
            return value
        if isinstance(value, enum.Enum):
            return self.read(value.value, path=path, depth=depth)
        if isinstance(value, np.generic):
            return self.read(cast(Any, value).item(), path=path, depth=depth)
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                self.lost.append(f"{path or 'it'} has {len(value)} characters and was cut to {MAX_TEXT}")
            return str(value[:MAX_TEXT])
        if isinstance(value, int):
            is_small = -MAX_INTEGER < value < MAX_INTEGER
            return int(value) if is_small else self._lose(f"integer of {value.bit_length()} bits", path=path)
        if isinstance(value, float):
            return float(value)
        if depth >= MAX_DEPTH or id(value) in self._open:
            return self._lose(f"nested more than {MAX_DEPTH} deep, or within itself", path=path)
        self._open.add(id(value))
        try:
            return self._read_object(value, path=path, depth=depth)
        except Exception:  # noqa: BLE001  (its methods are user code)
            return self._lose(f"{type(value).__name__} object that cannot be read", path=path)
        finally:
            self._open.discard(id(value))

    def _read_object(self, value: Any, *, path: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            return self._pairs(cast("Mapping[Any, Any]", value).items(), path=path, depth=depth)
        names = _field_names(value)
        if names is not None:
            return self._pairs([(name, getattr(value, name)) for name in names], path=path, depth=depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [
                self.read(item, path=f"{path}[{number}]", depth=depth + 1)
                for number, item in enumerate(cast("Iterable[Any]", value))
            ]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, np.ndarray):
            array = cast(Any, value)
            return self.read(array.tolist(), path=path, depth=depth) if array.dtype.hasobject else array
        if _is_tensor_or_image(value):
            return value
        if isinstance(value, (bytearray, memoryview)):
            return bytes(cast(Any, value))
        if isinstance(value, _WRITTEN_AS_TEXT):
            return str(value)
        return self._lose(f"{type(value).__name__} object", path=path)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], *, path: str, depth: int) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for key, value in pairs:
            name = self.read(key, path=f"a key of {path or 'it'}", depth=MAX_DEPTH - 1)
            name = name if isinstance(name, str) else short_repr(name)
            read[name] = self.read(value, path=f"{path}.{name}" if path else name, depth=depth + 1)
        return read

    def _lose(self, what: str, *, path: str) -> str:
        self.lost.append(f"{path[:200] or 'it'} is not storable ({what})")
        return f"<{what}>"


def _field_names(value: Any) -> Iterable[str] | None:
    """Return the field names of a data class, struct, pydantic model or named tuple; None for any other object."""
    kind: Any = cast(Any, type(value))
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    for attribute in ("__struct_fields__", "model_fields", "_fields"):
        names: Any = getattr(kind, attribute, None)
        if isinstance(names, (tuple, dict)):
            return cast("Iterable[str]", names)
    return None


def _is_tensor_or_image(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    pillow: Any = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
