"""Translates requests of the Responses API to chat requests, and chat completions to responses."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.responses.calls import CallRecord
from agent_loop.completions.responses.conversation import (
    PlacedItem,
    assistant_message,
    messages_of,
)
from agent_loop.completions.responses.items import AdditionalTools, ItemReference, read_item
from agent_loop.completions.responses.output import OutputOptions
from agent_loop.completions.responses.requests import ResponsesRequest
from agent_loop.completions.responses.store import ResponseStore, StoredResponse
from agent_loop.completions.responses.tools import Tools, read_tool_choice, read_tools
from agent_loop.errors import RequestError

_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Names of parameters in this API, by their names in chat requests."""


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """Request of the Responses API with its chat request."""

    request: ResponsesRequest
    chat: ChatCompletionRequest
    tools: Tools
    input_items: Sequence[Mapping[str, Any]]
    """Items of the whole conversation, each with an id."""
    messages: Sequence[Mapping[str, Any]]
    """The conversation without instructions."""
    num_characters: int
    """Size of this request's items."""
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def unmet(self) -> Sequence[str]:
        """Ignored parts of the request, each described for an incident."""
        verbosity = None if self.request.text is None else self.request.text.verbosity
        hinted = (
            [] if verbosity in (None, "medium") else ["text.verbosity was ignored: no chat template knows it"]
        )
        return [
            *hinted,
            *(f"{name} was ignored: hosted tools are not available" for name in self.tools.dropped),
        ]

    @property
    def output_options(self) -> OutputOptions:
        request = self.request
        return OutputOptions(
            response_id=self.id,
            tools=self.tools,
            has_reasoning_summary=request.has_reasoning_summary,
            has_encrypted_reasoning=request.includes("reasoning.encrypted_content"),
            has_logprobs=bool(self.chat.logprobs),
        )

    def messages_with(
        self, text: str, *, reasoning: str, calls: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return the conversation with the model's turn."""
        return [*self.messages, assistant_message(text, reasoning=reasoning, calls=calls)]


def prepare_response(
    request: ResponsesRequest, *, store: ResponseStore, calls: CallRecord, wishes: Collection[str] = ()
) -> PreparedResponse:
    """Translate a request.

    Args:
        request: The request.
        store: Responses that the request may continue or name.
        calls: Calls that the model made.
        wishes: Hosted tools that the request may do without, by names such as `tools.web_search`.

    Raises:
        RequestError: The request uses a feature that is not supported, or names a response that is not stored.
    """
    if request.background and request.stream:
        raise RequestError(
            "background and stream cannot be combined; leave one of them out", param="background"
        )
    if request.background and not request.is_stored:
        raise RequestError(
            "background needs store=true, because the response is retrieved later", param="store"
        )
    previous = _previous(request, store)
    given = _given_items(request.input, store)
    placed = [each.placed for each in given if not isinstance(each.placed.item, AdditionalTools)]
    messages = [*previous.messages, *messages_of(placed, known=calls)]
    items = [each.written for each in given]
    more = [item for item in [*previous.input_items, *items] if item["type"] == "additional_tools"]
    tools = read_tools(
        [*(request.tools or ()), *(tool for item in more for tool in item["tools"])], wishes=wishes
    )
    return PreparedResponse(
        request=request,
        chat=_chat_request(request, messages, tools),
        tools=tools,
        input_items=[*previous.input_items, *items],
        messages=messages,
        num_characters=sum(len(json.dumps(item)) for item in items),
    )


@dataclass(frozen=True, slots=True)
class _GivenItem:
    """Item of a request."""

    placed: PlacedItem
    written: Mapping[str, Any]
    """The item as the client wrote it, with an id."""


@dataclass(frozen=True, slots=True)
class _Previous:
    """Conversation that a request continues."""

    messages: Sequence[Mapping[str, Any]] = ()
    input_items: Sequence[Mapping[str, Any]] = ()


def _previous(request: ResponsesRequest, store: ResponseStore) -> _Previous:
    if request.previous_response_id is None:
        return _Previous()
    stored: StoredResponse = store.continued(request.previous_response_id)
    output = [item.model_dump() for item in stored.response.output]
    return _Previous(stored.messages, [*stored.input_items, *output])


def _given_items(given: str | Sequence[Mapping[str, Any]] | None, store: ResponseStore) -> list[_GivenItem]:
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    return list(_items(given or (), store))


def _items(given: Sequence[Mapping[str, Any]], store: ResponseStore) -> Iterator[_GivenItem]:
    for index, raw in enumerate(given):
        where = f"input[{index}]"
        item = read_item(raw, where=where)
        if isinstance(item, ItemReference):
            found = store.item(item.id)
            if found is None:
                raise RequestError(
                    f"{where}: there is no stored item {item.id!r}; send the item itself", param=f"{where}.id"
                )
            raw, item = found, read_item(found, where=where)
        written = {"type": "message", **raw, "id": raw.get("id") or f"item_{uuid4().hex}"}
        yield _GivenItem(PlacedItem(item, where), written)


def _chat_request(
    request: ResponsesRequest, messages: Sequence[Mapping[str, Any]], tools: Tools
) -> ChatCompletionRequest:
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    has_logprobs = request.includes("message.output_text.logprobs") or bool(request.top_logprobs)
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [*instructions, *messages],
        "tools": list(tools.functions) or None,
        "tool_choice": read_tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": has_logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": _response_format(request),
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    try:
        return ChatCompletionRequest.read(
            {name: value for name, value in fields.items() if value is not None}
        )
    except RequestError as error:
        raise renamed(error) from None


def renamed(error: RequestError) -> RequestError:
    """Return an error about a chat request with the names of this API."""
    first, dot, rest = (error.param or "").partition(".")
    base, bracket, index = first.partition("[")
    name = _NAMES.get(base)
    if name is None:
        return error
    param = f"{name}{bracket}{index}{dot}{rest}"
    return RequestError(str(error).replace(error.param or "", param, 1), param=param, code=error.code)


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") != "json_schema":
        return dict(wanted)
    schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
