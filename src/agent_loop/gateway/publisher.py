"""Parses a completion as its tokens arrive, and publishes the chunks to the requests that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.chat import create_stream_parser, first_call_end
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_builder import ParsedChunk, ResponseBuilder
from agent_loop.completions.sampling import ChunkDecoder, missing_logprobs_error
from agent_loop.completions.stream_parser import ParsedDelta
from agent_loop.completions.turn_prefix import TurnPrefix
from agent_loop.episode import Completion
from agent_loop.gateway.shared_completion import SharedCompletion
from agent_loop.types import IntArray, Message, TokenChunk, ToolCall, as_token_ids


@dataclass(frozen=True, slots=True)
class SentMessage:
    """Assistant message in the form that the client receives."""

    message: Message
    calls: Mapping[str, ToolCall]
    """Tool calls of the message, by the ids that the client receives."""


class CompletionPublisher:
    """Parses one completion and adds the parsed chunks to a `SharedCompletion`.

    Args:
        request: Request that the completion answers.
        shared: Receives the parsed chunks.
        template: Chat template of the model.
        context: Tokens before the turn.
        prefix: Beginning of the turn.
        turn_name: Name of the turn, unique in the session. Prefix of call ids if the model's format has no ids.
        index: Index of the completion in the response.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        shared: SharedCompletion,
        *,
        template: ChatTemplate,
        context: IntArray,
        prefix: TurnPrefix,
        turn_name: str,
        index: int,
    ) -> None:
        self._needs_logprobs = bool(request.logprobs)
        self._index = index
        prompt_ids = (
            np.concatenate([context, as_token_ids(prefix.token_ids)]) if prefix.token_ids else context
        )
        ends_after = first_call_end(request, template=template, context=context, prefix=prefix)
        self.is_needed_per_token = bool(request.stream or request.stops or ends_after)
        """Whether `on_chunk` has to be called while the completion is sampled."""
        self._shared = shared
        self._builder = ResponseBuilder(
            request, template, prompt_ids, new_call_id=partial(_call_id, turn_name)
        )
        # The session keeps this builder for retries, which bring their own request. The messages of all requests
        # together would grow with the square of the conversation.
        shared.builder = replace(
            self._builder, request=request.model_copy(update={"messages": [], "tools": None})
        )
        self._decoder = ChunkDecoder(
            template,
            stops=request.stops,
            keeps_end_tokens=template.tool_parser.reads_end_tokens,
            prefix=prefix.token_ids,
            ends_after=ends_after,
        )
        self._parser, self._before = create_stream_parser(
            request, template=template, context=context, prefix=prefix
        )
        self._chunks: list[ParsedChunk] = []

    def on_chunk(self, chunk: TokenChunk) -> bool:
        """Publish a chunk of tokens. Return whether the server should continue sampling.

        Raises:
            RequestError: The request asks for log-probs and the server returns none.
        """
        if chunk.stop_reason == "aborted":
            return True
        if self._needs_logprobs and chunk.logprobs is None:
            raise missing_logprobs_error()
        for decoded in self._decoder.feed(chunk):
            delta = self._before + self._parser.feed(decoded.text)
            self._before = ParsedDelta()
            if decoded.finish_reason is not None:
                delta += self._parser.finish()
            parsed = ParsedChunk(self._index, decoded, delta)
            self._chunks.append(parsed)
            self._shared.add(parsed)
            if decoded.finish_reason is not None:
                return chunk.stop_reason is not None
        return True

    def finish(self, completion: Completion, *, begun: Message | None, reasoning: str) -> SentMessage:
        """Publish the completion if it was not streamed, and return the message of the turn.

        Args:
            completion: The completion.
            begun: Message that the completion continues, as the client has it.
            reasoning: Reasoning of that message, which the client may have left out.

        Raises:
            RequestError: The request asks for log-probs and the server returns none.
        """
        if not self._chunks:
            for chunk in completion.sampled.chunks:
                self.on_chunk(chunk)
        sent = self._builder.choice(self._index, self._chunks).message
        parsed = [call for chunk in self._chunks for call in chunk.delta.tool_calls]
        calls = {sent_call.id: call for sent_call, call in zip(sent.tool_calls or [], parsed, strict=True)}
        message: Message = {
            "role": "assistant",
            "content": ("" if begun is None else str(begun["content"])) + (sent.content or ""),
            "reasoning_content": reasoning + (sent.reasoning_content or ""),
            "tool_calls": [{**call.as_message(), "id": call_id} for call_id, call in calls.items()],
        }
        return SentMessage(message, calls)


def _call_id(turn_name: str, position: int) -> str:
    """Return an id that stays the same when the turn is replayed.

    Some chat templates accept only ids of nine letters and digits. The id has that form as long as there are fewer
    than 100 branches, 1,000 turns and 10 calls.
    """
    return f"{turn_name}C{position}"
