"""A completion, read while the model speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.chat import create_stream_parser
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_builder import ParsedChunk, ResponseBuilder
from agent_loop.completions.sampling import ChunkDecoder, missing_logprobs
from agent_loop.episode import Completion
from agent_loop.gateway.shared_completion import SharedCompletion
from agent_loop.types import IntArray, Message, TokenChunk, ToolCall


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One completion, as the client is told it."""

    message: Message
    calls: Mapping[str, ToolCall]
    """The calls in it by the ids that the client is told."""


class CompletionPublisher:
    """Reads one completion and hands what it reads to an answer.

    Args:
        request: What it answers.
        answer: Takes the steps.
        template: Of the model.
        prompt_ids: What the model was given.
        turn_name: Tells the turn from the session's others; calls whose format has no ids are named after it.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        answer: SharedCompletion,
        *,
        template: ChatTemplate,
        prompt_ids: IntArray,
        turn_name: str,
    ) -> None:
        self._needs_logprobs = bool(request.logprobs)
        self._answer = answer
        self._writer = ResponseBuilder(
            request, template, prompt_ids, new_call_id=partial(_call_id, turn_name)
        )
        answer.writer = self._writer
        self._parts = ChunkDecoder(
            template, stops=request.stops, keeps_end_tokens=template.tool_parser.reads_end_tokens
        )
        self._reader = create_stream_parser(request, template=template, prompt_ids=prompt_ids)
        self._steps: list[ParsedChunk] = []

    def hear(self, chunk: TokenChunk) -> bool:
        """Reads what a chunk adds; tells whether the model may go on.

        Raises:
            RequestError: Log-probs are asked for and the server gives none.
        """
        if chunk.stop_reason == "aborted":
            return True
        if self._needs_logprobs and chunk.logprobs is None:
            raise missing_logprobs()
        for part in self._parts.feed(chunk):
            reading = self._reader.feed(part.text)
            if part.finish_reason is not None:
                reading += self._reader.finish()
            step = ParsedChunk(0, part, reading)
            self._steps.append(step)
            self._answer.add(step)
            if part.finish_reason is not None:
                return chunk.stop_reason is not None
        return True

    def finish(self, completion: Completion) -> SentMessage:
        """Reads what came in one piece; returns what was said, as the client is told it.

        Raises:
            RequestError: Log-probs are asked for and the server gives none.
        """
        if not self._steps:
            for chunk in completion.sampled.chunks:
                self.hear(chunk)
        told = self._writer.choice(0, self._steps).message
        read = [call for step in self._steps for call in step.reading.tool_calls]
        calls = {reply.id: call for reply, call in zip(told.tool_calls or [], read, strict=True)}
        message: Message = {
            "role": "assistant",
            "content": told.content or "",
            "reasoning_content": told.reasoning_content or "",
            "tool_calls": [{**call.as_message(), "id": call_id} for call_id, call in calls.items()],
        }
        return SentMessage(message, calls)


def _call_id(turn_name: str, position: int) -> str:
    """The same when a turn is replayed, and nine letters and digits where it can be: all that some templates take."""
    return f"{turn_name}C{position}"
