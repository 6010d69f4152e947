"""Checks of servers' replies where they enter the pool. Code behind these checks trusts completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeAlias, cast

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert, defstruct

from agent_loop.errors import BadServerReply
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.servers.base import ServerHealth
from agent_loop.types import ServerStopReason, TokenArrays, TokenChunk

MAX_TOKEN_ID = 2**31 - 1
MAX_WEIGHT_VERSION = 2**31 - 1
"""The largest integer in the batch's column of weight versions."""
MIN_LOG_PROB = -10_000.0
"""Lowest allowed log-prob. Engines that cannot represent minus infinity return -9999."""
LOG_PROB_ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much from rounding; they are set to 0."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
CountOrNone: TypeAlias = Count | None
PositiveOrNone: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)] | None


class ReplyCheck:
    """Check that chunks of servers follow the contract of `TokenChunk`.

    Accepted chunks are copied, so that a server cannot change them later. NumPy arrays and scalars are converted to
    Python's.

    Args:
        vocab_size: Number of rows of the model's embedding; None allows any id that fits into int32.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._contract = _contract_of(vocab_size)

    def chunk(self, reply: Any, *, server: str, request_id: str, max_tokens: int | None = None) -> TokenChunk:
        """Return a checked copy of one chunk of a completion.

        Args:
            max_tokens: Number of tokens that the request has left.
        """
        try:
            if not isinstance(reply, TokenChunk):
                raise _Invalid(f"stream yielded {describe_value(reply)}, not a TokenChunk")
            fields = self._fields(reply)
            num_tokens = len(fields["token_ids"])
            if fields["logprobs"] is not None and len(fields["logprobs"]) != num_tokens:
                raise _Invalid(f"it has {num_tokens} token ids but {len(fields['logprobs'])} log-probs")
            if max_tokens is not None and num_tokens > max_tokens:
                raise _Invalid(f"it has {num_tokens} tokens where max_tokens was {max_tokens}")
            extras = _checked_extras(reply.extras, num_tokens=num_tokens)
        except _Invalid as error:
            raise bad_reply(str(error), server=server, request_id=request_id) from error.__cause__
        return TokenChunk(**fields, extras=extras)

    def _fields(self, reply: TokenChunk) -> dict[str, Any]:
        """Return the fields without extras."""
        names = self._contract.__struct_fields__
        plain = {name: _plain(getattr(reply, name, None)) for name in names}
        try:
            checked = convert(plain, self._contract)
        except ValidationError as error:
            raise _Invalid(_described(error, plain)) from error
        fields = {name: getattr(checked, name) for name in names}
        if fields["logprobs"] and max(fields["logprobs"]) > 0:
            fields["logprobs"] = [min(logprob, 0.0) for logprob in fields["logprobs"]]
        return fields


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
    """Check a health report, and return it."""
    if not isinstance(reply, ServerHealth):
        raise BadServerReply(f"health returned {describe_value(reply)}, not a ServerHealth")
    try:
        convert(reply, _Health, from_attributes=True)
    except ValidationError as error:
        raise BadServerReply(f"health returned an invalid field: {error}") from error
    return reply


class _Health(Struct):
    is_alive: bool
    num_running: Count
    num_waiting: Count
    weight_version: int
    detail: str
    kv_cache_share: PositiveOrNone


class _Invalid(Exception):
    """A reply breaks its contract."""


@lru_cache(maxsize=16)
def _contract_of(vocab_size: int | None) -> type[Any]:
    largest_id = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    logprobs: Any = list[Annotated[float, Meta(ge=MIN_LOG_PROB, le=LOG_PROB_ROUNDING)]]
    fields: dict[str, Any] = {
        "token_ids": list[Annotated[int, Meta(ge=0, le=largest_id)]],
        "logprobs": logprobs | None,
        "weight_version": Annotated[int, Meta(ge=0, le=MAX_WEIGHT_VERSION)],
        "stop_reason": ServerStopReason | None,
        "num_preempted": Count,
        "num_cached_tokens": CountOrNone,
        "prefill_s": PositiveOrNone,
    }
    return defstruct("Chunk", list(fields.items()))


def _checked_extras(extras: Any, *, num_tokens: int) -> TokenArrays:
    """Return read-only copies of the arrays."""
    if isinstance(extras, dict) and not extras:
        return {}
    if not isinstance(extras, Mapping):
        raise _Invalid(f"its extras are {describe_value(extras)}, not a mapping of arrays")
    checked: dict[str, Any] = {}
    for name, given in cast("Mapping[Any, Any]", extras).items():
        try:
            array = np.array(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise _Invalid(f"its extras {name!r:.60} are not an array: {describe_error(error)}") from error
        if not isinstance(name, str) or array.dtype.kind not in "biuf" or array.shape[:1] != (num_tokens,):
            raise _Invalid(
                f"its extras {name!r:.60} are an array of {array.dtype} of shape {list(array.shape)} for {num_tokens} "
                "tokens; return arrays of numbers by name, with one entry for each token"
            )
        array.flags.writeable = False
        checked[name] = array
    return checked


def _plain(value: Any) -> Any:
    """Return NumPy arrays and scalars, also those in a list, as Python lists and scalars."""
    if isinstance(value, (np.ndarray, np.generic)):
        return cast(Any, value).tolist()
    if isinstance(value, (list, tuple)):
        elements = cast("list[Any]", value)
        return [each.item() if isinstance(each, np.generic) else each for each in elements]
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
    return f"{path.strip('`').removeprefix('$.')} is {describe_value(value)}, {expected}"
