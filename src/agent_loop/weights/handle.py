"""Handle of an offer of weights: the tensors, and where receivers find them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from agent_loop.errors import WeightsError

Transport = Literal["shared_memory", "cuda_ipc", "broadcast", "disk"]

FieldT = TypeVar("FieldT")

FORMAT = 2
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an offer."""

    name: str
    dtype: str
    """Name such as `bfloat16`; a key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    bucket: int
    """Index of the block, file or message that holds the tensor."""
    offset: int
    """Offset of the first byte in the bucket; 0 if tensors are found by name."""
    checksum: int | None = None
    """Checksum as in `agent_loop.weights.checksum`; None if the handle has no checksums."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """Handle of one offer. Its JSON has about 100 bytes per tensor."""

    transport: Transport
    weight_version: int
    tensors: tuple[TensorSpec, ...]
    """Tensors in the order in which they were given to the sender. Names are unique."""
    source: Mapping[str, Any]
    """Where the bytes are. The keys depend on the transport."""
    has_checksums: bool = True
    """Whether the receiver verifies the checksum of each tensor before it returns it."""
    base: WeightHandle | None = None
    """Handle of the base weights if the tensors are factors of adapters (see `agent_loop.weights.adapted`). It stays
    open while offers refer to it, for receivers that do not have the base yet."""
    base_id: str = ""
    """Identifies the base. A receiver that has this base does not read it again."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors without those of the base."""
        return sum(spec.num_bytes for spec in self.tensors)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes for `check_weights`, so that an engine can reject weights before it reads them."""
        return [(spec.name, spec.shape) for spec in (self.base or self).tensors]

    def field(self, key: str, kind: type[FieldT]) -> FieldT:
        """Return an entry of `source`.

        Raises:
            WeightsError: The entry is missing or has another type.
        """
        value = self.source.get(key)
        if not isinstance(value, kind):
            raise _invalid_handle(f"{key} of its source is {value!r}")
        return value

    def to_json(self) -> str:
        return json.dumps(self._to_fields(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightHandle:
        """Parse a handle that `to_json` wrote.

        Raises:
            WeightsError: The text is not a handle, or was written by another version of this package.
        """
        try:
            found = json.loads(text)
        except (ValueError, TypeError) as error:
            raise _invalid_handle(f"it is not JSON ({error})") from None
        return cls._from_fields(found)

    def _to_fields(self) -> dict[str, Any]:
        tensors = [
            [spec.name, spec.dtype, list(spec.shape), spec.bucket, spec.offset, spec.checksum]
            for spec in self.tensors
        ]
        fields: dict[str, Any] = {
            "format": FORMAT,
            "transport": self.transport,
            "weight_version": self.weight_version,
            "has_checksums": self.has_checksums,
            "source": dict(self.source),
            "tensors": tensors,
        }
        if self.base is not None:
            fields |= {"base": self.base._to_fields(), "base_id": self.base_id}
        return fields

    @classmethod
    def _from_fields(cls, found: Any) -> WeightHandle:
        if not isinstance(found, dict):
            raise _invalid_handle(f"it is a JSON {type(found).__name__}")
        fields = cast(dict[str, Any], found)
        if fields.get("format") != FORMAT:
            raise _invalid_handle(f"its format is {fields.get('format')!r} instead of {FORMAT}")
        if fields.get("transport") not in get_args(Transport):
            raise _invalid_handle(f"its transport is {fields.get('transport')!r}")
        if not _is_count(fields.get("weight_version")):
            raise _invalid_handle(f"its weight_version is {fields.get('weight_version')!r}")
        if not isinstance(fields.get("has_checksums"), bool) or not isinstance(fields.get("source"), dict):
            raise _invalid_handle("has_checksums or source is missing")
        if not isinstance(fields.get("tensors"), list):
            raise _invalid_handle("the list of tensors is missing")
        tensors = tuple(_parse_spec(row) for row in cast(list[Any], fields["tensors"]))
        refuse_duplicates(tensors)
        base = None if "base" not in fields else cls._from_fields(fields["base"])
        base_id = fields.get("base_id", "")
        if not isinstance(base_id, str) or bool(base_id) != (base is not None):
            raise _invalid_handle(f"its base_id is {base_id!r}")
        if base is not None and base.base is not None:
            raise _invalid_handle("its base has a base")
        return cls(
            transport=fields["transport"],
            weight_version=fields["weight_version"],
            tensors=tensors,
            source=cast(dict[str, Any], fields["source"]),
            has_checksums=fields["has_checksums"],
            base=base,
            base_id=base_id,
        )


def refuse_duplicates(tensors: tuple[TensorSpec, ...]) -> None:
    """Raise an error if two tensors have the same name.

    Raises:
        WeightsError: Two tensors have the same name.
    """
    if len({spec.name for spec in tensors}) < len(tensors):
        (name, times), *_ = Counter(spec.name for spec in tensors).most_common(1)
        raise WeightsError(f"weight {name!r} was published {times} times; publish each weight once")


def _parse_spec(row: Any) -> TensorSpec:
    match row:
        case [str(name), str(dtype), [*shape], bucket, offset, checksum] if dtype in DTYPE_BYTES and all(
            _is_count(number) for number in (*shape, bucket, offset)
        ):
            if checksum is None or _is_count(checksum):
                return TensorSpec(name, dtype, tuple(shape), bucket, offset, checksum)
            raise _invalid_handle(f"the checksum of {name!r} is {checksum!r}")
        case _:
            raise _invalid_handle(f"a tensor is {row!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _invalid_handle(why: str) -> WeightsError:
    return WeightsError(
        f"this is not a weight handle: {why}; pass on the result of WeightHandle.to_json() unchanged, and use the same "
        "version of agent-loop on both sides"
    )
