"""Protobuf messages of the Tinker API: rows to train on, log-probs of targets, and sampled sequences.

The messages are described here as far as the server needs them; unknown fields are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from agent_loop.errors import DataError
from agent_loop.types import FloatArray, IntArray

Array = NDArray[Any]
EMPTY_LOGPROB = -99999.0
"""Log-prob of a cell of top-k log-probs that has no token. Its token id is 0."""
FLOAT32 = 1
_DTYPES = {FLOAT32: np.float32, 2: np.int64, 3: np.int32, 4: np.uint16}
"""Types of numbers by their wire value. The last is bfloat16, whose bits are the upper half of a float32."""
_STOP_REASONS = {"stop": 0, "length": 1}


@dataclass(frozen=True, slots=True)
class Datum:
    """Row of a training request."""

    token_ids: IntArray
    """Input of the model, shape [T]."""
    inputs: Mapping[str, Array]
    """Inputs of the loss, each [T], or [T, K] with several targets of a position."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Request of a forward pass, with or without a backward pass."""

    data: Sequence[Datum]
    loss_name: str
    loss_settings: Mapping[str, float | str]
    is_forward_only: bool
    model_id: str
    number: int
    """Number of the request among those of its client."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """Sampled completion."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    top: tuple[IntArray, FloatArray] | None = None
    """Ids and log-probs of the likeliest tokens at each place, [num_tokens, k]."""


def read_training_data(body: bytes) -> TrainingData:
    """Parse a request for a forward and a backward pass."""
    try:
        message = message_class("ForwardBackwardRequest").FromString(body)
    except DecodeError as error:
        raise DataError(f"the body is not a ForwardBackwardRequest: {error}") from error
    settings: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    settings |= {entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2}
    data = [_read_datum(datum, where=f"datum {number}") for number, datum in enumerate(message.data)]
    if not data:
        raise DataError("the request has no data; send at least one datum")
    return TrainingData(
        data, message.loss_fn, settings, message.forward_only, message.model_id, message.seq_id
    )


def write_outputs(logprobs: Sequence[FloatArray], *, metrics: Mapping[str, float]) -> bytes:
    """Return the result of a forward pass: the log-probs of the targets of each datum, [T] or [T, K], and metrics."""
    output = message_class("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for trailing_shape, run in groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = list(run)
        ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        field = output.loss_fn_outputs.add(num_datums=len(arrays)).fields.add(key="logprobs")
        field.value.data = b"".join(array.astype(np.float32, copy=False).tobytes() for array in arrays)
        field.value.offsets = ends.tobytes()
        field.value.dtype = FLOAT32
        field.value.trailing_shape.extend(trailing_shape)
    for name, value in metrics.items():
        output.metrics.add(key=name, value=value)
    return output.SerializeToString()


def write_samples(
    sequences: Sequence[SampledSequence],
    *,
    prompt_logprobs: FloatArray | None = None,
    top_of_prompt: tuple[IntArray, FloatArray] | None = None,
) -> bytes:
    """Return the result of sampling. Prompt log-probs are NaN where there is none."""
    reply = message_class("SampleResponse")()
    for sequence in sequences:
        written = reply.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=np.asarray(sequence.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
        if sequence.top is not None:
            _write_top(written.topk_sampled_logprobs, *sequence.top)
    if prompt_logprobs is not None:
        reply.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if top_of_prompt is not None:
        _write_top(reply.topk_prompt_logprobs, *top_of_prompt)
    return reply.SerializeToString()


def _write_top(message: Any, ids: IntArray, logprobs: FloatArray) -> None:
    message.token_ids, message.logprobs = (
        ids.astype(np.int32).tobytes(),
        logprobs.astype(np.float32).tobytes(),
    )
    message.length, message.k = ids.shape


def _read_datum(message: Any, *, where: str) -> Datum:
    chunks: list[bytes] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise DataError(f"{where} has an image or audio; this server trains on text only")
        chunks.append(chunk.encoded_text.tokens)
    token_ids = np.frombuffer(b"".join(chunks), np.int32)
    inputs = {entry.key: _read_tensor(entry.value) for entry in message.loss_fn_inputs}
    if not len(token_ids):
        raise DataError(f"{where} has no tokens; send at least one")
    for name, array in inputs.items():
        if array.ndim not in (1, 2) or len(array) != len(token_ids):
            raise DataError(
                f"{where}: {name} has shape {list(array.shape)}, but model_input has {len(token_ids)} tokens; give "
                "one value, or one row, for each"
            )
    return Datum(token_ids, inputs)


def _read_tensor(message: Any) -> Array:
    """Return a dense array; cells that a sparse tensor does not list are 0."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise DataError(f"a tensor has the type {message.dtype}, which is not known")
    shape = tuple(message.shape)
    if not message.HasField("sparse_csr"):
        values = np.frombuffer(message.dense, dtype)
        array = values.reshape(shape) if shape else values
    else:
        sparse = message.sparse_csr
        ends = np.frombuffer(sparse.crow_indices, np.int64)
        array = np.zeros(shape, dtype)
        rows = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        array[rows, np.frombuffer(sparse.col_indices, np.int64)] = np.frombuffer(sparse.values, dtype)
    if dtype is np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


_SCHEMA = {
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config NumberEntry*, 6 forward_only bool, 7 loss_fn_config_v2 SettingEntry*",
    "NumberEntry": "1 key string, 2 value double",
    "SettingEntry": "1 key string, 2 value Setting",
    "Setting": "1 number double, 2 text string",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs TensorEntry*",
    "Chunk": "1 encoded_text Text",
    "Text": "1 tokens bytes",
    "TensorEntry": "1 key string, 2 value Tensor",
    "Tensor": "1 dense bytes, 2 sparse_csr Sparse, 3 dtype int32, 4 shape int64*",
    "Sparse": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs Record*, 3 metrics NumberEntry*",
    "Record": "1 type_tag string, 2 fields FieldEntry*, 3 num_datums int64",
    "FieldEntry": "1 key string, 2 value Field",
    "Field": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "SampleResponse": "1 sequences Sequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs Top",
    "Sequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs Top",
    "Top": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
}
"""Fields of each message: number, name and type, with a star if repeated. Maps are repeated entries on the wire."""
_TYPES = {
    "double": 1,
    "int64": 3,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "message": 11,
    "bytes": 12,
    "uint32": 13,
}
_PACKAGE = "agent_loop.tinker"


@cache
def message_class(name: str) -> Any:
    """Return the class of a message of the Tinker API."""
    return message_factory.GetMessageClass(_descriptors().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _descriptors() -> Any:
    file: Any = descriptor_pb2.FileDescriptorProto(
        name="agent_loop/tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            number, field_name, kind = text.split()
            kind, is_repeated = kind.rstrip("*"), kind.endswith("*")
            field = message.field.add(name=field_name, number=int(number), label=3 if is_repeated else 1)
            field.type = _TYPES.get(kind, _TYPES["message"])
            if kind not in _TYPES:
                field.type_name = f".{_PACKAGE}.{kind}"
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
