"""Checks of servers' replies where they enter the pool. Code behind these checks trusts completions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeAlias, cast

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert, defstruct
from numpy.typing import NDArray

from agent_loop.errors import BadServerReply
from agent_loop.runtime.describe import describe_error, one_line
from agent_loop.servers.base import ServerHealth
from agent_loop.types import ServerStopReason, TokenArrays, TokenChunk, TokenOutput

MAX_TOKEN_ID = 2**31 - 1
MAX_WEIGHT_VERSION = 2**31 - 1
"""The largest integer in the batch's column of weight versions."""
MIN_LOG_PROB = -10_000.0
"""Lowest allowed log-prob. Engines that cannot represent minus infinity return -9999."""
LOG_PROB_ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much from rounding; they are set to 0."""
MAX_COUNT = 2**53

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
CountOrNone: TypeAlias = Count | None
SecondsOrNone: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)] | None
ShareOrNone: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)] | None
Version: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_WEIGHT_VERSION)]


class ReplyCheck:
    """Check that replies of servers follow the contract of `TokenOutput` and `TokenChunk`.

    Accepted replies are copied, so that a server cannot change them later. NumPy arrays and scalars are accepted and
    converted to Python's.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        """Create a check for one vocabulary.

        Args:
            vocab_size: Number of rows of the model's embedding; None allows any id that fits into int32.
        """
        self._contracts = _contracts_of(vocab_size)

    def output(
        self, reply: Any, *, server: str, request_id: str, max_tokens: int | None = None
    ) -> TokenOutput:
        """Return a checked copy of a whole completion.

        Args:
            max_tokens: `max_tokens` of the request.

        Raises:
            BadServerReply: The reply is not a valid completion of the request.
        """
        source = _Source(server, request_id)
        if not isinstance(reply, TokenOutput):
            raise source.bad(f"generate returned {_type_of(reply)}, not a TokenOutput")
        given: Any = reply.chunks
        if not isinstance(given, (tuple, list)) or not given:
            raise source.bad(f"its chunks are {_type_of(given)}, not a tuple of TokenChunk")
        chunks: list[TokenChunk] = []
        num_left = max_tokens
        for chunk in cast("Sequence[Any]", given):
            if chunks and chunks[-1].stop_reason is not None:
                raise source.bad("it has chunks after the one with its stop reason")
            chunks.append(self.chunk(chunk, server=server, request_id=request_id, max_tokens=num_left))
            num_left = None if num_left is None else num_left - len(chunks[-1].token_ids)
        if chunks[-1].stop_reason is None:
            raise source.bad("stop_reason is None, expected one of 'stop', 'length' and 'aborted'")
        return TokenOutput.from_chunks(chunks)

    def chunk(self, reply: Any, *, server: str, request_id: str, max_tokens: int | None = None) -> TokenChunk:
        """Return a checked copy of one chunk of a completion. See `output`."""
        source = _Source(server, request_id)
        if not isinstance(reply, TokenChunk):
            raise source.bad(f"stream yielded {_type_of(reply)}, not a TokenChunk")
        fields = _read(reply, self._contracts.chunk, self._contracts.rounded_chunk, source)
        extras: TokenArrays = {}
        if reply.extras:
            extras = _checked_extras(reply.extras, source, num_tokens=len(fields.token_ids))
        _check_lengths(fields, source, max_tokens)
        return TokenChunk(
            token_ids=fields.token_ids,
            logprobs=fields.logprobs,
            weight_version=fields.weight_version,
            stop_reason=fields.stop_reason,
            num_preempted=fields.num_preempted,
            num_cached_tokens=fields.num_cached_tokens,
            prefill_s=fields.prefill_s,
            extras=extras,
        )


def bad_reply(what: str, *, server: str, request_id: str) -> BadServerReply:
    """Return the error for an invalid reply.

    Args:
        what: Problem with the reply, after "its reply is invalid: ".
    """
    return BadServerReply(
        f"its reply is invalid: {what}; fix the server, whose contract is in docs/how-to.md, section "
        "'What a reply must hold'",
        server=server,
        request_id=request_id,
    )


def checked_health(reply: Any) -> ServerHealth:
    """Return a checked copy of a health report.

    Raises:
        BadServerReply: The reply is not a `ServerHealth`, or a field has a wrong type.
    """
    if not isinstance(reply, ServerHealth):
        raise BadServerReply(f"health returned {_type_of(reply)}, not a ServerHealth")
    try:
        fields = convert(reply, _Health, from_attributes=True)
    except ValidationError as error:
        raise BadServerReply(f"health returned an invalid field: {error}") from error
    return ServerHealth(
        is_alive=fields.is_alive,
        num_running=fields.num_running,
        num_waiting=fields.num_waiting,
        weight_version=fields.weight_version,
        detail=fields.detail,
        kv_cache_share=fields.kv_cache_share,
    )


class _Health(Struct):
    is_alive: bool
    num_running: Count
    num_waiting: Count
    weight_version: int
    detail: str
    kv_cache_share: ShareOrNone


class _Contracts(NamedTuple):
    """Types that replies are converted to. The `rounded` types accept log-probs that exceed 0 by rounding."""

    chunk: type[Any]
    rounded_chunk: type[Any]


class _Source(NamedTuple):
    server: str
    request_id: str

    def bad(self, what: str) -> BadServerReply:
        return bad_reply(what, server=self.server, request_id=self.request_id)


@lru_cache(maxsize=16)
def _contracts_of(vocab_size: int | None) -> _Contracts:
    largest_id = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    token_ids = list[Annotated[int, Meta(ge=0, le=largest_id)]]

    def contract(largest_logprob: float) -> type[Any]:
        logprobs: Any = list[Annotated[float, Meta(ge=MIN_LOG_PROB, le=largest_logprob)]]
        fields: dict[str, Any] = {
            "token_ids": token_ids,
            "logprobs": logprobs | None,
            "weight_version": Version,
            "num_preempted": Count,
            "num_cached_tokens": CountOrNone,
            "prefill_s": SecondsOrNone,
            "stop_reason": ServerStopReason | None,
        }
        return defstruct("Chunk", list(fields.items()))

    return _Contracts(chunk=contract(0.0), rounded_chunk=contract(LOG_PROB_ROUNDING))


def _read(reply: TokenChunk, contract: type[Any], rounded: type[Any], source: _Source) -> Any:
    """Return the fields of a reply. Nearly all replies pass the first attempt, which takes microseconds."""
    try:
        return convert(reply, contract, from_attributes=True)
    except ValidationError:
        pass
    plain = {name: _plain(getattr(reply, name, None)) for name in rounded.__struct_fields__}
    try:
        fields = convert(plain, rounded)
    except ValidationError as error:
        raise source.bad(_described(error, plain)) from error
    if fields.logprobs is not None:
        fields.logprobs = [min(logprob, 0.0) for logprob in fields.logprobs]
    return fields


def _checked_extras(extras: Any, source: _Source, *, num_tokens: int) -> TokenArrays:
    """Return read-only copies of the arrays."""
    if not isinstance(extras, Mapping):
        raise source.bad(f"its extras are {_type_of(extras)}, not a mapping of arrays")
    checked: dict[str, NDArray[Any]] = {}
    for name, given in cast("Mapping[Any, Any]", extras).items():
        try:
            array = np.array(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise source.bad(
                f"its extras {_shown(name)} are not an array: {describe_error(error)}"
            ) from error
        if not isinstance(name, str) or array.dtype.kind not in "biuf":
            raise source.bad(
                f"its extras {_shown(name)} are an array of {array.dtype}; return arrays of numbers by name"
            )
        if array.shape[:1] != (num_tokens,):
            raise source.bad(
                f"its extras {name!r} have shape {list(array.shape)} for {num_tokens} tokens; return one entry each"
            )
        array.flags.writeable = False
        checked[name] = array
    return checked


def _check_lengths(fields: Any, source: _Source, max_tokens: int | None) -> None:
    num_tokens = len(fields.token_ids)
    if fields.logprobs is not None and len(fields.logprobs) != num_tokens:
        raise source.bad(f"it has {num_tokens} token ids but {len(fields.logprobs)} log-probs")
    if max_tokens is not None and num_tokens > max_tokens:
        raise source.bad(f"it has {num_tokens} tokens where max_tokens was {max_tokens}")


def _plain(value: Any, *, depth: int = 2) -> Any:
    """Return NumPy arrays and scalars as Python lists and scalars."""
    if isinstance(value, (np.ndarray, np.generic)):
        return cast(Any, value).tolist()
    if depth and isinstance(value, (list, tuple)):
        return [_plain(element, depth=depth - 1) for element in cast("list[Any]", value)]
    return value


def _described(error: ValidationError, fields: dict[str, Any]) -> str:
    """Return the name of the invalid field, its value and the expected value."""
    expected, _, path = str(error).partition(" - at ")
    found = re.search(r"\$\.(\w+)(?:\[(\d+)\])?", path)
    if found is None:
        return str(error)
    value = fields.get(found[1])
    if found[2] is not None and isinstance(value, list):
        value = cast("list[Any]", value)[int(found[2])]
    expected = expected.replace("`", "").replace("Expected", "expected", 1)
    return f"{path.strip('`').removeprefix('$.')} is {_shown(value)}, {expected}"


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:  # (Python refuses to write thousands of digits)
        return "a huge integer"
    return one_line(repr(value), max_length=60) if isinstance(value, (int, float, str)) else _type_of(value)


def _type_of(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, BaseException):
        return describe_error(value)
    return f"an object of type {type(value).__name__}"
