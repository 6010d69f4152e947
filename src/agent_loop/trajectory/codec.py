"""The codec of trajectories and of their records, for journals, messages, files and traces.

A record is a msgspec struct or a data class. The codec reads the fields from the class, so a new field needs no code
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Struct

from agent_loop.trajectory.incidents import Failure, Feedback, Incident
from agent_loop.trajectory.output import AgentLoopMetrics, AgentLoopOutput
from agent_loop.trajectory.segments import Segment
from agent_loop.types import StopReason, TokenChunk, TokenOutput, as_token_ids

RecordT = TypeVar("RecordT")
LogprobType: TypeAlias = type[np.float32] | type[np.float64]
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
    """Return the record that `to_plain` was given."""
    return msgspec.convert(plain, kind, dec_hook=_as_declared)


def to_dict(output: AgentLoopOutput, *, with_segments: bool = True) -> dict[str, Any]:
    """Return an output as mappings and lists by the names of the fields. Arrays and values of users stay as they are.

    Args:
        output: Output of a trajectory.
        with_segments: Whether to include the segments. Formats that store tokens in a form of their own do not.
    """
    names = [field.name for field in fields(AgentLoopOutput) if with_segments or field.name != "segments"]
    return {name: to_plain(getattr(output, name)) for name in names}


def from_dict(values: Mapping[str, Any], *, segments: Sequence[Segment] | None = None) -> AgentLoopOutput:
    """Return the output that `to_dict` was given.

    Args:
        values: Result of `to_dict`, also after it was JSON.
        segments: Segments of an output that was converted without them.
    """
    failure = values["failure"]
    return AgentLoopOutput(
        segments=from_plain(values["segments"], list[Segment]) if segments is None else segments,
        stop_reason=StopReason(values["stop_reason"]),
        reward_score=values["reward_score"],
        tool_schemas=values["tool_schemas"],
        messages=values["messages"],
        metrics=from_plain(values["metrics"], AgentLoopMetrics),
        feedback=from_plain(values["feedback"], list[Feedback]),
        incidents=from_plain(values["incidents"], list[Incident]),
        failure=None if failure is None else from_plain(failure, Failure),
        extra_fields=values["extra_fields"],
        num_turns=values["num_turns"],
    )


def encode_completion(output: TokenOutput, *, logprob_type: LogprobType = np.float64) -> bytes:
    """Return a completion as msgpack bytes: the fields of each chunk by name, values per token as arrays.

    Args:
        logprob_type: float64 keeps log-probs to the bit; float32 takes half of the bytes.
    """
    return _ENCODER.encode([_packed_chunk(chunk, logprob_type) for chunk in output.chunks])


def decode_completion(data: bytes) -> TokenOutput:
    """Return the completion that `encode_completion` was given."""
    return TokenOutput.from_chunks([_unpacked_chunk(fields) for fields in _DECODER.decode(data)])


def _packed_chunk(chunk: TokenChunk, logprob_type: LogprobType) -> dict[str, Any]:
    """Return the fields of a chunk that differ from their defaults."""
    packed = {name: getattr(chunk, name) for name in TokenChunk.__slots__}
    packed = {name: value for name, value in packed.items() if value != _DEFAULTS.get(name, MISSING)}
    packed["token_ids"] = as_token_ids(chunk.token_ids)
    if chunk.logprobs is not None:
        packed["logprobs"] = np.asarray(chunk.logprobs, logprob_type)
    return packed


def _unpacked_chunk(packed: Mapping[str, Any]) -> TokenChunk:
    logprobs = packed["logprobs"]
    values: dict[str, Any] = {
        **packed,
        "token_ids": packed["token_ids"].tolist(),
        "logprobs": None if logprobs is None else logprobs.tolist(),
    }
    try:
        return TokenChunk(**values)
    except TypeError as error:
        raise ValueError(f"a completion has unknown fields: {error}") from error


_DEFAULTS: dict[str, Any] = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(TokenChunk)
}


def _as_declared(kind: Any, value: Any) -> Any:
    """Return an array for a field of arrays. msgspec itself does not support arrays."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} instead of an array")
    return cast(Any, value)


def encode_array(value: Any) -> msgspec.msgpack.Ext:
    """Return an array as a msgpack extension type, for the encoder's `enc_hook`."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot be encoded")
    array = cast("np.ndarray[Any, Any]", value)
    header = msgspec.msgpack.encode((array.dtype.str, array.shape))
    return msgspec.msgpack.Ext(ARRAY_CODE, bytes([len(header)]) + header + array.tobytes())


def decode_array(code: int, data: memoryview) -> Any:
    """Return the array that `encode_array` was given, read-only. For the decoder's `ext_hook`."""
    if code != ARRAY_CODE:
        raise NotImplementedError(f"extension type {code}")
    end = 1 + data[0]
    dtype, shape = msgspec.msgpack.decode(data[1:end], type=tuple[str, tuple[int, ...]])
    return np.frombuffer(data[end:], np.dtype(dtype)).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_DECODER = msgspec.msgpack.Decoder(list[dict[str, Any]], ext_hook=decode_array)
