"""Writes one response: the whole object, the events of its stream, and its entry in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.completions.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorResponse,
    FinishReason,
    ResponseModel,
    ResponseToolCall,
    Usage,
)
from agent_loop.completions.responses.calls import CallRecord
from agent_loop.completions.responses.output import Event, OutputBuilder
from agent_loop.completions.responses.response_models import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from agent_loop.completions.responses.store import ResponseStore, StoredResponse
from agent_loop.completions.responses.translation import PreparedResponse


class ResponseWriter:
    """Writes one response. Used for one completion, which is either whole or streamed.

    Args:
        prepared: The request.
        store: Receives the response, unless the request forbids it.
        calls: Receives the calls of the response.
    """

    def __init__(self, prepared: PreparedResponse, *, store: ResponseStore, calls: CallRecord) -> None:
        self._prepared = prepared
        self._store = store
        self._calls = calls
        self._output = OutputBuilder(prepared.output_options)
        self._turn = _SampledTurn()
        self._num_events = 0
        self._has_started = False

    # -- whole -----------------------------------------------------------------------------------------------------

    def start(self) -> ResponseObject:
        """Return the response before its completion, and store it."""
        return self._saved(self._response("in_progress"))

    def write_whole(self, completion: ChatCompletion) -> ResponseObject:
        """Return the response of a whole completion, and store it."""
        [choice] = completion.choices
        message = choice.message
        if choice.logprobs is not None:
            self._output.add_logprobs(choice.logprobs.content or [])
        self._add(message.reasoning_content, message.content, message.tool_calls)
        self._turn.finish_reason, self._turn.usage = choice.finish_reason, completion.usage
        self._output.finish(is_complete=choice.finish_reason != "length")
        return self._finished()

    def write_failure(self, error: ErrorResponse) -> ResponseObject:
        """Return the response of a completion that failed, and store it."""
        code = error.error.code or error.error.type
        failure = ResponseFailure(code=code, message=error.error.message)
        return self._saved(self._response("failed", failure=failure))

    def write_cancellation(self) -> ResponseObject:
        """Return the response of a completion that was cancelled, and store it."""
        return self._saved(self._response("cancelled"))

    # -- streamed --------------------------------------------------------------------------------------------------

    def write(self, chunk: ResponseModel) -> bytes:
        """Return the events of one chunk."""
        assert isinstance(chunk, ChatCompletionChunk)
        events = [] if self._has_started else self._begin()
        self._turn.usage = chunk.usage or self._turn.usage
        for choice in chunk.choices:
            if choice.logprobs is not None:
                self._output.add_logprobs(choice.logprobs.content or [])
            delta = choice.delta
            events += self._add(delta.reasoning_content, delta.content, delta.tool_calls)
            self._turn.finish_reason = choice.finish_reason or self._turn.finish_reason
        return self._encoded(events)

    def end(self) -> bytes:
        """Return the events after the last chunk, and store the response."""
        is_complete = self._turn.finish_reason != "length"
        events = [
            *([] if self._has_started else self._begin()),
            *self._output.finish(is_complete=is_complete),
        ]
        response = self._finished()
        return self._encoded(
            [*events, {"type": f"response.{response.status}", "response": response.model_dump()}]
        )

    def write_error(self, error: ErrorResponse) -> bytes:
        """Return the last event of a failed stream, and store the response."""
        if not self._has_started:
            detail = error.error
            return self._encoded(
                [{"type": "error", "code": detail.code, "message": detail.message, "param": detail.param}]
            )
        response = self.write_failure(error)
        return self._encoded([{"type": "response.failed", "response": response.model_dump()}])

    # -- parts -----------------------------------------------------------------------------------------------------

    def _begin(self) -> list[Event]:
        self._has_started = True
        started = self._response("in_progress").model_dump()
        return [{"type": f"response.{kind}", "response": started} for kind in ("created", "in_progress")]

    def _add(
        self, reasoning: str | None, text: str | None, calls: Sequence[ResponseToolCall] | None
    ) -> list[Event]:
        events: list[Event] = []
        if reasoning:
            self._turn.reasoning.append(reasoning)
            events += self._output.add_reasoning(reasoning)
        if text:
            self._turn.texts.append(text)
            events += self._output.add_text(text)
        for call in calls or ():
            self._turn.calls.append(
                {"type": "function", "id": call.id, "function": call.function.model_dump()}
            )
            events += self._output.add_call(call.id, call.function)
        return events

    def _encoded(self, events: Sequence[Event]) -> bytes:
        written = b""
        for event in events:
            data = json.dumps({**event, "sequence_number": self._num_events})
            written += f"event: {event['type']}\ndata: {data}\n\n".encode()
            self._num_events += 1
        return written

    def _finished(self) -> ResponseObject:
        response = self._saved(self._response(self._turn.status))
        self._calls.add(response, custom_arguments=self._output.custom_arguments)
        return response

    def _saved(self, response: ResponseObject) -> ResponseObject:
        prepared, turn = self._prepared, self._turn
        if prepared.request.is_stored:
            messages = prepared.messages_with(
                "".join(turn.texts), reasoning="".join(turn.reasoning), calls=turn.calls
            )
            size = prepared.num_characters + len(response.model_dump_json())
            self._store.add(
                StoredResponse(response, prepared.input_items, messages=messages, num_characters=size)
            )
        return response

    def _response(self, status: ResponseStatus, *, failure: ResponseFailure | None = None) -> ResponseObject:
        prepared, request, usage = self._prepared, self._prepared.request, self._turn.usage
        is_incomplete = status == "incomplete"
        return ResponseObject(
            id=prepared.id,
            created_at=prepared.created_at,
            status=status,
            error=failure,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_incomplete else None,
            model=request.model,
            output=self._output.items,
            usage=None if usage is None or status == "in_progress" else _usage(usage),
            instructions=request.instructions,
            previous_response_id=request.previous_response_id,
            metadata=request.metadata or {},
            background=bool(request.background),
            store=request.is_stored,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            text={"format": {"type": "text"}} if request.text is None else _shown_text(request.text.format),
            reasoning={} if request.reasoning is None else request.reasoning.model_dump(exclude_none=True),
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
        )


class _SampledTurn:
    """Turn of the model in the form of a chat message, with how it ended."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: FinishReason = "stop"
        self.usage: Usage | None = None

    @property
    def status(self) -> ResponseStatus:
        return "incomplete" if self.finish_reason == "length" else "completed"


def _shown_text(text_format: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"format": dict(text_format or {"type": "text"})}


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.prompt_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=0 if details is None else details.cached_tokens
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=usage.total_tokens,
    )
