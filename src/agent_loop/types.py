"""The facts that travel through the system: tokens, completions, trajectories. Needs numpy and msgspec only."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from agent_loop.errors import SamplingParamsError, did_you_mean

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
TokenIds: TypeAlias = Sequence[int] | IntArray
Message: TypeAlias = dict[str, Any]
"""One chat message in the OpenAI form: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`."""
Row: TypeAlias = Mapping[str, Any]
"""One line of a data set: `raw_prompt` (the messages) and any other columns."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    MAX_USER_TURNS = "max_user_turns"
    MAX_INVALID_TURNS = "max_invalid_turns"
    RESPONSE_LENGTH = "response_length"
    PROMPT_LENGTH = "prompt_length"
    TOOL_FINISHED = "tool_finished"
    INTERACTION_FINISHED = "interaction_finished"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    FAILED = "failed"


class AgentState(StrEnum):
    """Where the tool loop stands."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class Origin(StrEnum):
    """Who wrote the tokens of a segment."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"
    INTERACTION = "interaction"


class SamplingParams(Struct, frozen=True):
    """How one completion is sampled. Loops pass plain mappings; servers receive this."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """At most this many candidates; -1 is no limit."""
    max_tokens: int | None = None
    """At most this many new tokens; None is whatever the server allows."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, beside the model's own end tokens. A sampled stop token is returned."""
    seed: int | None = None
    """Makes this completion reproducible, whatever runs beside it."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens (`stop_token_ids` still end it)."""
    repetition_penalty: float = 1.0
    """Only 1.0 (none) is exact to train on; servers refuse what they do not offer."""
    num_sampled: int = 0
    """So many tokens at the end of the prompt are the beginning of this completion: they were sampled before it was
    interrupted. A server with `Ability.FREE_SEEDS` then draws what it would have drawn without the interruption."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise SamplingParamsError(
                f"temperature is {self.temperature}; give 0 (greedy) or more, and finite"
            )
        if not 0 < self.top_p <= 1:
            raise SamplingParamsError(f"top_p is {self.top_p}; give more than 0 and at most 1")
        if self.top_k == 0 or self.top_k < -1:
            raise SamplingParamsError(f"top_k is {self.top_k}; give -1 (no limit) or at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SamplingParamsError(f"max_tokens is {self.max_tokens}; give at least 1, or None")
        if self.num_sampled < 0:
            raise SamplingParamsError(f"num_sampled is {self.num_sampled}; give 0 or more")
        if not 0 < self.repetition_penalty < inf:
            raise SamplingParamsError(
                f"repetition_penalty is {self.repetition_penalty}; give 1.0 (none) or another finite number above 0"
            )

    @classmethod
    def parse(cls, params: Mapping[str, Any] | SamplingParams) -> SamplingParams:
        """Reads a mapping.

        Raises:
            SamplingParamsError: A key is unknown or a value is out of range.
        """
        if isinstance(params, SamplingParams):
            return params
        known = cls.__struct_fields__
        for key in params:
            if key not in known:
                raise SamplingParamsError(f"unknown sampling parameter {key!r}{did_you_mean(key, known)}")
        values = dict(params)
        try:
            values["stop_token_ids"] = tuple(values.get("stop_token_ids") or ())
            return cls(**values)
        except TypeError as error:
            raise SamplingParamsError(f"sampling parameters are {values!r}: {error}; give numbers") from error

    def limited(self, max_tokens: int, *, more_stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        """The same with another `max_tokens` and more stop tokens.

        Raises:
            SamplingParamsError: `max_tokens` is less than 1.
        """
        return structs.replace(
            self, max_tokens=max_tokens, stop_token_ids=self.stop_token_ids + more_stop_token_ids
        )

    def after(self, num_sampled: int) -> SamplingParams:
        """The parameters with which the rest of a completion is sampled, once so many of its tokens were."""
        return structs.replace(
            self,
            max_tokens=None if self.max_tokens is None else self.max_tokens - num_sampled,
            num_sampled=self.num_sampled + num_sampled,
        )


ServerStopReason: TypeAlias = Literal["stop", "length", "aborted"]


class VersionSpan(NamedTuple):
    """A run of tokens that one weight version sampled."""

    weight_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)  # (a Struct would compare all its fields)
class TokenOutput:
    """One completion, as a server returns it."""

    token_ids: list[int]
    """The sampled tokens, the stop token included where one was sampled."""
    log_probs: list[float] | None
    """For each token `log_softmax(logits / temperature)`, natural log, before top-k and top-p cut anything away:
    what a trainer recomputes. Greedy completions give it at temperature 1. None if the server offers none."""
    stop_reason: ServerStopReason
    weight_version: int = 0
    """The version that sampled the last token."""
    num_preempted: int = 0
    """How often the server set the request aside and had to compute its prefix again."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the server did not have to compute; None if it does not say."""
    prefill_s: float | None = field(default=None, compare=False)
    """Seconds from when the engine took the request up to its first token; None if it does not say."""
    version_spans: tuple[VersionSpan, ...] = ()
    """The runs of weight versions, in order, where there is more than one; else empty."""

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.log_probs)} log-probs")
        if self.version_spans and sum(s.num_tokens for s in self.version_spans) != len(self.token_ids):
            raise ValueError(f"version spans {self.version_spans} do not cover {len(self.token_ids)} tokens")

    def then(self, rest: TokenOutput) -> TokenOutput:
        """The completion that this one is the beginning of, and `rest` what came of it later."""
        return TokenOutput.from_chunks([*TokenChunk.whole(self), *TokenChunk.whole(rest)])

    @classmethod
    def from_chunks(cls, chunks: Sequence[TokenChunk]) -> TokenOutput:
        """Joins a streamed completion. One whose last chunk has no stop reason was broken off: it is `aborted`."""
        spans: list[VersionSpan] = []
        for chunk in chunks:
            num_tokens = len(chunk.token_ids)
            if spans and spans[-1].weight_version == chunk.weight_version:
                num_tokens += spans.pop().num_tokens
            if num_tokens:
                spans.append(VersionSpan(chunk.weight_version, num_tokens))
        has_log_probs = all(chunk.log_probs is not None for chunk in chunks)
        last = chunks[-1] if chunks else TokenChunk([], [])
        return cls(
            token_ids=list(chain.from_iterable(chunk.token_ids for chunk in chunks)),
            log_probs=list(chain.from_iterable(chunk.log_probs or () for chunk in chunks))
            if has_log_probs
            else None,
            stop_reason=last.stop_reason or "aborted",
            weight_version=spans[-1].weight_version if spans else last.weight_version,
            num_preempted=sum(chunk.num_preempted for chunk in chunks),
            num_cached_tokens=last.num_cached_tokens,
            prefill_s=chunks[0].prefill_s if chunks else None,
            version_spans=tuple(spans) if len(spans) > 1 else (),
        )


@dataclass(frozen=True, slots=True)  # (a Struct would compare all its fields)
class TokenChunk:
    """The next part of a completion, as a server streams it: see `TokenOutput` for the fields."""

    token_ids: list[int]
    log_probs: list[float] | None
    weight_version: int = 0
    stop_reason: ServerStopReason | None = None
    """Set on the last part."""
    num_preempted: int = 0
    """Since the part before."""
    num_cached_tokens: int | None = None
    """Set on the last part."""
    prefill_s: float | None = field(default=None, compare=False)
    """Set on the first part."""

    def single_tokens(self) -> list[TokenChunk]:
        """The chunk token by token."""
        if len(self.token_ids) < 2:
            return [self]
        last = len(self.token_ids) - 1
        return [
            TokenChunk(
                token_ids=[token],
                log_probs=None if self.log_probs is None else [self.log_probs[position]],
                weight_version=self.weight_version,
                stop_reason=self.stop_reason if position == last else None,
                num_preempted=self.num_preempted if position == last else 0,
                num_cached_tokens=self.num_cached_tokens if position == last else None,
                prefill_s=None if position else self.prefill_s,
            )
            for position, token in enumerate(self.token_ids)
        ]

    @classmethod
    def whole(cls, output: TokenOutput) -> list[TokenChunk]:
        """A complete completion as a stream: one part per weight version."""
        spans = output.version_spans or (VersionSpan(output.weight_version, len(output.token_ids)),)
        chunks: list[TokenChunk] = []
        start = 0
        for span in spans:
            end, is_last = start + span.num_tokens, len(chunks) + 1 == len(spans)
            chunks.append(
                cls(
                    token_ids=output.token_ids[start:end],
                    log_probs=None if output.log_probs is None else output.log_probs[start:end],
                    weight_version=span.weight_version,
                    stop_reason=output.stop_reason if is_last else None,
                    num_preempted=output.num_preempted if is_last else 0,
                    num_cached_tokens=output.num_cached_tokens if is_last else None,
                    prefill_s=None if start else output.prefill_s,
                )
            )
            start = end
        return chunks


class ToolCall(Struct, frozen=True):
    """A call that the model wrote and that could be read."""

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def as_message(self) -> Message:
        """The OpenAI form, as chat templates expect it (arguments as a mapping)."""
        return {
            "type": "function",
            "id": self.id,
            "function": {"name": self.name, "arguments": self.arguments},
        }


class MalformedCall(Struct, frozen=True):
    """Something that the model meant as a call and that could not be read."""

    text: str
    error: str
    """What is wrong with it, in words that the model is answered with."""


class ParsedCompletion(Struct, frozen=True):
    """What a completion says: text, reasoning, and calls in the order they were written."""

    content: str
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    reasoning: str | None = None

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [call for call in self.calls if isinstance(call, ToolCall)]

    @property
    def malformed_calls(self) -> list[MalformedCall]:
        return [call for call in self.calls if isinstance(call, MalformedCall)]

    def as_message(self) -> Message:
        """The assistant message for the conversation's record."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if calls := [call.as_message() for call in self.calls if isinstance(call, ToolCall)]:
            message["tool_calls"] = calls
        return message


def _packer(code: Literal["i", "f"], dtype: Any) -> Callable[[Sequence[float] | NDArray[Any]], NDArray[Any]]:
    def packed(numbers: Sequence[float] | NDArray[Any]) -> NDArray[Any]:
        if isinstance(numbers, np.ndarray):
            return np.asarray(numbers, dtype)
        try:  # as numpy does it, in less than half of the time
            return np.frombuffer(struct.pack(f"{len(numbers)}{code}", *numbers), dtype)
        except (struct.error, OverflowError):
            return np.asarray(numbers, dtype)  # it takes what is nearly a number, or says what is wrong

    return packed


as_token_ids: Callable[[TokenIds], IntArray] = _packer("i", np.int32)
"""A packed int32 array of the ids, read-only where it can be; no copy if it is one already."""
as_log_probs: Callable[[Sequence[float] | FloatArray], FloatArray] = _packer("f", np.float32)
"""A packed float32 array of them, as for the ids."""
