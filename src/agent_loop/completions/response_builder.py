"""Builds the response to a chat request, whole or in chunks, from parsed completions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from agent_loop.chat.byte_level import bytes_of_name
from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_models import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogProbs,
    ChunkChoice,
    DeltaMessage,
    FinishReason,
    ResponseToolCall,
    TokenLogProb,
    ToolCallDelta,
    ToolCallFunction,
    TopLogProb,
)
from agent_loop.completions.sampling import DecodedChunk, UsageCounter
from agent_loop.completions.stream_parser import ParsedDelta
from agent_loop.types import IntArray, ToolCall


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Chunk of one of a request's completions, decoded and parsed."""

    index: int
    """Index of the completion."""
    decoded: DecodedChunk
    delta: ParsedDelta


def random_call_id(_: int) -> str:
    """Return a random call id."""
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ResponseBuilder:
    """Builds the response to one request."""

    request: ChatCompletionRequest
    template: ChatTemplate
    prompt_ids: IntArray
    new_call_id: Callable[[int], str] = random_call_id
    """Returns the id of the n-th call of a completion. Used if the model's format has no call ids."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def shown_prompt_ids(self) -> list[int] | None:
        """Prompt token ids; None unless the request asks for token ids."""
        return self.prompt_ids.tolist() if self.request.return_token_ids else None

    def usage_counter(self) -> UsageCounter:
        """Return a new counter of the request's tokens."""
        return UsageCounter(prompt_tokens=len(self.prompt_ids))

    def completion(self, choices: list[ChatChoice], *, usage: UsageCounter) -> ChatCompletion:
        """Build the whole response from its choices."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            usage=usage.usage,
            prompt_token_ids=self.shown_prompt_ids,
        )

    def choice(self, index: int, chunks: Sequence[ParsedChunk]) -> ChatChoice:
        """Build a whole choice from the chunks of its completion."""
        parsed = ParsedDelta.joined([chunk.delta for chunk in chunks])
        token_ids = [token for chunk in chunks for token in chunk.decoded.token_ids]
        logprobs = [p for chunk in chunks for p in self._logprobs(chunk.decoded)]
        calls = [ResponseToolCall(id=i, function=f) for i, f in self._with_ids(parsed.tool_calls)]
        last = chunks[-1].decoded
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=parsed.content if parsed.content or not calls else None,
                reasoning_content=parsed.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=_finish_reason(last, has_calls=bool(calls)) or "stop",
            logprobs=ChoiceLogProbs(content=logprobs) if self.request.logprobs else None,
            token_ids=token_ids if self.request.return_token_ids else None,
            stop_reason=last.stop_text,
        )

    def chunk_choice(self, chunk: ParsedChunk, *, is_first: bool) -> ChunkChoice | None:
        """Build the choice of a streamed chunk; None if the chunk adds nothing that the client sees."""
        decoded, parsed = chunk.decoded, chunk.delta
        calls = [
            ToolCallDelta(index=position, id=call_id, function=function)
            for position, (call_id, function) in enumerate(self._with_ids(parsed.tool_calls))
        ]
        finish_reason = _finish_reason(decoded, has_calls=bool(calls))
        shows_tokens = bool(self.request.return_token_ids or self.request.logprobs)
        is_empty = not (parsed.content or parsed.reasoning or calls or finish_reason)
        if is_empty and not is_first and not (shows_tokens and decoded.token_ids):
            return None
        return ChunkChoice(
            index=chunk.index,
            delta=DeltaMessage(
                role="assistant" if is_first else None,
                content=parsed.content or ("" if is_first else None),
                reasoning_content=parsed.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=finish_reason,
            logprobs=ChoiceLogProbs(content=self._logprobs(decoded)) if self.request.logprobs else None,
            token_ids=decoded.token_ids if self.request.return_token_ids else None,
            stop_reason=decoded.stop_text,
        )

    def chunk(
        self, choices: list[ChunkChoice], *, prompt_token_ids: list[int] | None = None
    ) -> ChatCompletionChunk:
        """Build a chunk of the stream from its choices."""
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )

    def usage_chunk(self, usage: UsageCounter) -> ChatCompletionChunk | None:
        """Build the last chunk, which holds the usage; None if the request does not ask for it."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return self.chunk([]).model_copy(update={"usage": usage.usage})

    def _logprobs(self, decoded: DecodedChunk) -> list[TokenLogProb]:
        """Return the log-probs of the chunk's tokens; none unless the request asks for them."""
        if not self.request.logprobs:
            return []
        tops = decoded.top_logprobs or [()] * len(decoded.token_ids)
        return [
            TokenLogProb(
                **self._candidate(token_id, logprob).model_dump(),
                top_logprobs=[self._candidate(*candidate) for candidate in top],
            )
            for token_id, logprob, top in zip(decoded.token_ids, decoded.logprobs or (), tops, strict=True)
        ]

    def _candidate(self, token_id: int, logprob: float) -> TopLogProb:
        token = self.template.decode([token_id])
        encoded = token.encode()
        if "\ufffd" in token:  # the token is part of a character
            encoded = bytes_of_name(self.template.tokenizer.convert_ids_to_tokens(token_id))
        return TopLogProb(token=token, logprob=logprob, bytes=list(encoded))

    def _with_ids(self, calls: Sequence[ToolCall]) -> list[tuple[str, ToolCallFunction]]:
        """Return each call with a unique id, which is the model's own id if there is one."""
        written: dict[str, ToolCallFunction] = {}
        for position, call in enumerate(calls):
            call_id = call.id if call.id and call.id not in written else self.new_call_id(position)
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            written[call_id] = ToolCallFunction(name=call.name, arguments=arguments)
        return list(written.items())


def _finish_reason(chunk: DecodedChunk, *, has_calls: bool) -> FinishReason | None:
    if chunk.finish_reason is None:
        return None
    if chunk.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"
