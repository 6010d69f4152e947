"""Checks of servers' replies where they enter the pool. Code behind these checks trusts completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, cast

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert, structs

from agent_loop.errors import BadServerReply
from agent_loop.runtime.describe import describe_value
from agent_loop.servers.base import ServerHealth
from agent_loop.types import ServerStopReason, TokenArrays, TokenChunk

MIN_LOG_PROB = -10_000.0
"""Lowest allowed log-prob. Engines that cannot represent minus infinity return -9999."""
LOG_PROB_ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much from rounding; they are set to 0."""

Int32: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LogProb: TypeAlias = Annotated[float, Meta(ge=MIN_LOG_PROB, le=LOG_PROB_ROUNDING)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
CountOrNone: TypeAlias = Count | None
PositiveOrNone: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)] | None


class _Chunk(Struct):
    """Contract of `TokenChunk`, without extras."""

    token_ids: list[Int32]
    logprobs: list[LogProb] | None
    weight_version: Int32
    stop_reason: ServerStopReason | None
    num_preempted: Count
    num_cached_tokens: CountOrNone
    prefill_s: PositiveOrNone


class _Health(Struct):
    """Contract of `ServerHealth`."""

    is_alive: bool
    num_running: Count
    num_waiting: Count
    weight_version: int
    detail: str
    kv_cache_share: PositiveOrNone


class ReplyCheck:
    """Check that chunks of servers follow the contract of `TokenChunk`.

    Accepted chunks are copied, so that a server cannot change them later. NumPy arrays and scalars are converted to
    Python's.

    Args:
        vocab_size: Number of rows of the model's embedding; None allows any id that fits into int32.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size or 2**31

    def chunk(self, reply: Any, *, server: str, request_id: str, max_tokens: int | None = None) -> TokenChunk:
        """Return a checked copy of one chunk of a completion.

        Args:
            max_tokens: Number of tokens that the request has left.
        """

        def require(is_valid: bool, problem: str) -> None:
            if not is_valid:
                raise bad_reply(problem, server=server, request_id=request_id)

        require(isinstance(reply, TokenChunk), f"stream yielded {describe_value(reply)}, not a TokenChunk")
        plain = {name: _plain(getattr(reply, name, None)) for name in _Chunk.__struct_fields__}
        try:
            fields = convert(plain, _Chunk)
            extras = _checked_extras(reply.extras, num_tokens=len(fields.token_ids))
        except (ValidationError, ValueError, TypeError) as error:
            raise bad_reply(f"a field of its chunk: {error}", server=server, request_id=request_id) from error
        num_tokens, logprobs = len(fields.token_ids), fields.logprobs
        largest = max(fields.token_ids, default=0)
        require(
            largest < self._vocab_size, f"token id {largest} is outside a vocabulary of {self._vocab_size}"
        )
        require(
            logprobs is None or len(logprobs) == num_tokens,
            f"it has {num_tokens} token ids but {len(logprobs or ())} log-probs",
        )
        require(
            max_tokens is None or num_tokens <= max_tokens,
            f"it has {num_tokens} tokens where max_tokens was {max_tokens}",
        )
        if logprobs and max(logprobs) > 0:
            fields.logprobs = [min(logprob, 0.0) for logprob in logprobs]
        return TokenChunk(**structs.asdict(fields), extras=extras)


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


def _checked_extras(extras: Any, *, num_tokens: int) -> TokenArrays:
    """Return read-only copies of the arrays."""
    if not isinstance(extras, Mapping):
        raise TypeError(f"its extras are {describe_value(extras)}, not a mapping of arrays")
    checked: dict[str, Any] = {}
    for name, given in cast("Mapping[Any, Any]", extras).items():
        array = np.array(given)
        if not isinstance(name, str) or array.dtype.kind not in "biuf" or array.shape[:1] != (num_tokens,):
            raise ValueError(
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
