"""The answers to a chat request, whole or in parts, from what was sampled and read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

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
)
from agent_loop.completions.sampling import DecodedChunk, UsageCounter
from agent_loop.completions.stream_parser import ParsedDelta
from agent_loop.types import IntArray, ToolCall


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """What one step of sampling adds to one of the completions."""

    index: int
    part: DecodedChunk
    reading: ParsedDelta


def random_call_id(_: int) -> str:
    """An id that no other call has."""
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ResponseBuilder:
    """Writes the answers to one request."""

    request: ChatCompletionRequest
    template: ChatTemplate
    prompt_ids: IntArray
    new_call_id: Callable[[int], str] = random_call_id
    """The id of the n-th call of a completion, where the model's format has none."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def shown_prompt_ids(self) -> list[int] | None:
        """Those that were asked for."""
        return self.prompt_ids.tolist() if self.request.return_token_ids else None

    def tally(self) -> UsageCounter:
        return UsageCounter(prompt_tokens=len(self.prompt_ids))

    def completion(self, choices: list[ChatChoice], *, tally: UsageCounter) -> ChatCompletion:
        """All choices, whole."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            usage=tally.usage,
            prompt_token_ids=self.shown_prompt_ids,
        )

    def choice(self, index: int, steps: Sequence[ParsedChunk]) -> ChatChoice:
        """One of the completions in one piece."""
        reading = ParsedDelta.joined([step.reading for step in steps])
        token_ids = [token for step in steps for token in step.part.token_ids]
        logprobs = [p for step in steps for p in step.part.logprobs or ()]
        calls = [ResponseToolCall(id=i, function=f) for i, f in self._written(reading.tool_calls)]
        last = steps[-1].part
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=reading.content if reading.content or not calls else None,
                reasoning_content=reading.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=_finish_reason(last, has_calls=bool(calls)) or "stop",
            logprobs=self._logprobs(token_ids, logprobs),
            token_ids=token_ids if self.request.return_token_ids else None,
            stop_reason=last.stop_text,
        )

    def chunk_choice(self, step: ParsedChunk, *, is_first: bool) -> ChunkChoice | None:
        """The share of one step in the stream; None if it adds nothing that is seen."""
        part, reading = step.part, step.reading
        calls = [
            ToolCallDelta(index=position, id=call_id, function=function)
            for position, (call_id, function) in enumerate(self._written(reading.tool_calls))
        ]
        finish_reason = _finish_reason(part, has_calls=bool(calls))
        shows_tokens = bool(self.request.return_token_ids or self.request.logprobs)
        is_empty = not (reading.content or reading.reasoning or calls or finish_reason)
        if is_empty and not is_first and not (shows_tokens and part.token_ids):
            return None
        return ChunkChoice(
            index=step.index,
            delta=DeltaMessage(
                role="assistant" if is_first else None,
                content=reading.content or ("" if is_first else None),
                reasoning_content=reading.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=finish_reason,
            logprobs=self._logprobs(part.token_ids, part.logprobs or []),
            token_ids=part.token_ids if self.request.return_token_ids else None,
            stop_reason=part.stop_text,
        )

    def chunk(
        self, choices: list[ChunkChoice], *, prompt_token_ids: list[int] | None = None
    ) -> ChatCompletionChunk:
        """A part of the stream."""
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )

    def usage_chunk(self, tally: UsageCounter) -> ChatCompletionChunk | None:
        """The last part of the stream, if it was asked for."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return self.chunk([]).model_copy(update={"usage": tally.usage})

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> ChoiceLogProbs | None:
        if not self.request.logprobs:
            return None
        both = zip(token_ids, logprobs, strict=True)
        return ChoiceLogProbs(content=[_token_logprob(self.template, *pair) for pair in both])

    def _written(self, calls: Sequence[ToolCall]) -> list[tuple[str, ToolCallFunction]]:
        """Each call with an id that is its own: the model's, where its format has ids."""
        written: dict[str, ToolCallFunction] = {}
        for position, call in enumerate(calls):
            call_id = call.id if call.id and call.id not in written else self.new_call_id(position)
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            written[call_id] = ToolCallFunction(name=call.name, arguments=arguments)
        return list(written.items())


def _finish_reason(part: DecodedChunk, *, has_calls: bool) -> FinishReason | None:
    if part.finish_reason is None:
        return None
    if part.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


def _token_logprob(template: ChatTemplate, token_id: int, logprob: float) -> TokenLogProb:
    token = template.decode([token_id])
    is_whole = "\ufffd" not in token
    return TokenLogProb(token=token, logprob=logprob, bytes=list(token.encode()) if is_whole else None)
