"""The facts that travel through the system: tokens, completions, trajectories. Needs numpy and msgspec only."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from agent_loop.sampling_params import SamplingParams as SamplingParams
from agent_loop.token_chunks import FORCED as FORCED
from agent_loop.token_chunks import ServerStopReason as ServerStopReason
from agent_loop.token_chunks import TokenArrays as TokenArrays
from agent_loop.token_chunks import TokenChunk as TokenChunk
from agent_loop.token_chunks import joined_arrays as joined_arrays
from agent_loop.token_chunks import same_arrays as same_arrays
from agent_loop.token_chunks import sliced as sliced
from agent_loop.token_chunks import stacked_arrays as stacked_arrays

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
    """State of the tool loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class Origin(StrEnum):
    """Origin of the tokens of a segment."""

    PROMPT = "prompt"
    MODEL = "model"
    PREFIX = "prefix"
    """Tokens with which an assistant turn begins, and which the model did not sample: a prefill, or a forced call."""
    TOOL = "tool"
    INTERACTION = "interaction"


@dataclass(frozen=True, slots=True, init=False)
class TokenOutput:
    """One completion, as a server returns it: consecutive chunks, one per weight version.

    A server makes one with `TokenOutput(token_ids, log_probs, stop_reason, weight_version)`, or with `from_chunks` if
    its weights changed during the completion. See `TokenChunk` for the fields.
    """

    chunks: tuple[TokenChunk, ...]
    """At least one. Only the last has a stop reason; adjacent chunks have different weight versions."""

    def __init__(
        self,
        token_ids: list[int],
        log_probs: list[float] | None,
        stop_reason: ServerStopReason,
        weight_version: int = 0,
        num_preempted: int = 0,
        num_cached_tokens: int | None = None,
        prefill_s: float | None = None,
        extras: TokenArrays | None = None,
    ) -> None:
        """Make a completion of one chunk.

        Raises:
            ValueError: The number of log-probs is not the number of tokens.
        """
        if log_probs is not None and len(log_probs) != len(token_ids):
            raise ValueError(f"{len(token_ids)} token ids but {len(log_probs)} log-probs")
        chunk = TokenChunk(
            token_ids,
            log_probs,
            weight_version,
            stop_reason,
            num_preempted,
            num_cached_tokens,
            prefill_s,
            extras or {},
        )
        object.__setattr__(self, "chunks", (chunk,))

    @classmethod
    def from_chunks(cls, chunks: Sequence[TokenChunk]) -> TokenOutput:
        """Join the chunks of a streamed completion.

        The stop reason is `aborted` if the last chunk has none.
        """
        chunks = chunks or [TokenChunk([], [])]
        runs: list[list[TokenChunk]] = [[]]
        version: int | None = None
        for chunk in chunks:
            if chunk.token_ids and chunk.weight_version != version:
                if version is not None:
                    runs.append([])
                version = chunk.weight_version
            runs[-1].append(chunk)
        joined = [TokenChunk.joined(run) for run in runs]
        if joined[-1].stop_reason is None:
            joined[-1] = replace(joined[-1], stop_reason="aborted")
        if len(joined) > 1 and any(chunk.logprobs is None for chunk in joined):
            joined = [replace(chunk, logprobs=None) for chunk in joined]
        output = object.__new__(cls)
        object.__setattr__(output, "chunks", tuple(joined))
        return output

    def then(self, rest: TokenOutput) -> TokenOutput:
        """Return the completion that begins with this one and continues with `rest`."""
        return TokenOutput.from_chunks([*self.chunks, *rest.chunks])

    @property
    def token_ids(self) -> list[int]:
        """All sampled tokens."""
        if len(self.chunks) == 1:
            return self.chunks[0].token_ids
        return list(chain.from_iterable([chunk.token_ids for chunk in self.chunks]))

    @property
    def log_probs(self) -> list[float] | None:
        """One for each token, or None."""
        if len(self.chunks) == 1:
            return self.chunks[0].logprobs
        return TokenChunk.joined(self.chunks).logprobs

    @property
    def extras(self) -> TokenArrays:
        """The arrays that all chunks have, shape [num_tokens, ...]."""
        return TokenChunk.joined(self.chunks).extras

    @property
    def stop_reason(self) -> ServerStopReason:
        """Why the completion ended."""
        return self.chunks[-1].stop_reason or "aborted"

    @property
    def weight_version(self) -> int:
        """The version that sampled the last token."""
        return self.chunks[-1].weight_version

    @property
    def num_preempted(self) -> int:
        """How often the server preempted the request."""
        return sum([chunk.num_preempted for chunk in self.chunks])

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the server found in its cache; None if unknown."""
        return self.chunks[-1].num_cached_tokens

    @property
    def prefill_s(self) -> float | None:
        """Seconds to the first token; None if unknown."""
        return self.chunks[0].prefill_s


def top_logprob_arrays(token_ids: Any, logprobs: Any, *, num_top: int) -> TokenArrays:
    """Return the extras of `SamplingParams.top_logprobs`.

    Args:
        token_ids: Token ids of all tokens, end to end or one list per token. Likewise `logprobs`.
        num_top: Number of entries per token.

    Raises:
        ValueError: A token has more or fewer entries.
    """
    return {
        "top_token_ids": np.array(token_ids, np.int32).reshape(-1, num_top),
        "top_logprobs": np.array(logprobs, np.float32).reshape(-1, num_top),
    }


class ToolCall(Struct, frozen=True):
    """Tool call in a completion."""

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def as_message(self) -> Message:
        """Return the call in OpenAI's form, with arguments as a mapping, as chat templates expect it."""
        return {
            "type": "function",
            "id": self.id,
            "function": {"name": self.name, "arguments": self.arguments},
        }


class MalformedCall(Struct, frozen=True):
    """Tool call in a completion that could not be parsed."""

    text: str
    error: str
    """Error in the call, which the model gets as the reply."""


class ParsedCompletion(Struct, frozen=True):
    """Parsed completion: text, reasoning, and calls in order."""

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
        """Return the assistant message for the conversation."""
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
            return np.asarray(numbers, dtype)  # accepts more types, or raises an error that explains

    return packed


as_token_ids: Callable[[TokenIds], IntArray] = _packer("i", np.int32)
"""Return token ids as an int32 array. The array is read-only unless it is the argument itself."""
as_logprobs: Callable[[Sequence[float] | FloatArray], FloatArray] = _packer("f", np.float32)
"""Return log-probs as a float32 array. See `as_token_ids`."""
