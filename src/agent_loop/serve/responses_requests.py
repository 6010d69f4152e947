"""Requests of the Responses API, translated to chat requests.

A turn of the model is several items: reasoning, a message, calls. They are one assistant message.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema

from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.serve.chat_requests import (
    ChatCompletionRequest,
    FiniteFloat,
    Ignored,
    Only,
    RequestModel,
    read_part,
)
from agent_loop.serve.responses_tools import CUSTOM_INPUT, Tools, chat_name, read_tool_choice, read_tools

Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Additional output. Only the first two have an effect, because the others belong to hosted tools."""
SummaryKind = Literal["auto", "concise", "detailed"]
Text: TypeAlias = str | list[dict[str, Any]]
_ItemId = Annotated[str, Field(max_length=256)] | None
_CallId = Annotated[str, Field(min_length=1, max_length=256)]
_Name = Annotated[str, Field(pattern=r"^\S+$", max_length=256)]
_CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Names of parameters in this API, by their names in chat requests."""


# -- the request -------------------------------------------------------------------------------------------------------


class ReasoningOptions(RequestModel):
    """How the model reasons, and how its reasoning is returned."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    """Same as `reasoning_effort` of chat requests."""
    summary: SummaryKind | None = None
    """If set, the whole reasoning is returned as the summary instead of as content."""
    generate_summary: SummaryKind | None = None
    """Older name of `summary`."""
    context: Annotated[Any, Only("auto", "all_turns")] = None
    """Reasoning of earlier turns stays in the conversation as far as the client sends it."""
    mode: Annotated[Any, Only("standard")] = None


class TextOptions(RequestModel):
    """Format of the text."""

    format: dict[str, Any] | None = None
    """Object with a `type`: `text`, `json_object`, or `json_schema` with `name`, `schema` and `strict`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect."""


class ResponsesStreamOptions(RequestModel):
    """Options of a stream."""

    include_obfuscation: Ignored = None


def _refuse_stored(value: Any) -> Any:
    if value:
        raise ValueError("responses are not stored; send the whole conversation as input")
    return value


Stored = Annotated[Any, AfterValidator(_refuse_stored), WithJsonSchema({"enum": [None, False]})]
"""Field that asks for a stored response."""


class ResponsesRequest(RequestModel):
    """Body of `/v1/responses`."""

    names_here = {  # noqa: RUF012  (pydantic's ClassVar of the base class)
        "functions": "tools",
        "logprobs": 'include: ["message.output_text.logprobs"]',
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "system": "instructions",
        "verbosity": "text.verbosity",
    }

    model: str
    input: str | list[dict[str, Any]] | None = None
    """Text of a user message, or items: messages, calls, outputs of calls and reasoning."""
    instructions: str | None = None
    """System message before the conversation."""
    previous_response_id: Stored = None
    store: Stored = None
    background: Stored = None
    include: list[Includable] | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of type `function`, `custom`, or `namespace`, which groups functions."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Annotated[Any, Only("disabled")] = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    """Returned unchanged."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None

    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None
    max_tool_calls: Ignored = None
    """Limits the calls of hosted tools only, which are not supported."""
    client_metadata: Ignored = None

    conversation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    context_management: Annotated[Any, Only([])] = None
    moderation: Annotated[Any, Only()] = None
    access_programs: Annotated[Any, Only()] = None
    background_options: Annotated[Any, Only()] = None
    image: Annotated[Any, Only()] = None

    @property
    def has_reasoning_summary(self) -> bool:
        options = self.reasoning
        return options is not None and bool(options.summary or options.generate_summary)

    def includes(self, name: Includable) -> bool:
        """Return whether the response should include this additional output."""
        return name in (self.include or ())


# -- items -------------------------------------------------------------------------------------------------------------


class InputItem(RequestModel):
    """Item of a request."""

    id: _ItemId = None
    status: Ignored = None


class ModelItem(InputItem):
    """Item that the model produced. Unknown fields, which agent frameworks add, are ignored."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(InputItem):
    """Message of a user, system or developer."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: Text
    phase: Ignored = None


class AssistantItem(ModelItem):
    """Message of the assistant."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: Text


class ReasoningInput(ModelItem):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class FunctionCallInput(ModelItem):
    """Call of a function."""

    type: Literal["function_call"]
    call_id: _CallId
    name: _Name
    namespace: _Name | None = None
    arguments: str


class CustomCallInput(ModelItem):
    """Call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: _CallId
    name: _Name
    namespace: _Name | None = None
    input: str


class CallOutput(InputItem):
    """Result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: _CallId
    output: Text
    name: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None


class AdditionalTools(InputItem):
    """More tools. They are declared in the prompt together with the request's own tools."""

    type: Literal["additional_tools"]
    role: Literal["developer"] | None = None
    tools: list[dict[str, Any]]


_CallItem: TypeAlias = FunctionCallInput | CustomCallInput
_ModelItem: TypeAlias = AssistantItem | ReasoningInput | FunctionCallInput | CustomCallInput
Item: TypeAlias = MessageItem | _ModelItem | CallOutput | AdditionalTools
MODEL_ITEMS = (AssistantItem, ReasoningInput, FunctionCallInput, CustomCallInput)
_MODELS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningInput,
    "function_call": FunctionCallInput,
    "custom_tool_call": CustomCallInput,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
    "additional_tools": AdditionalTools,
}


def _read_item(item: Mapping[str, Any], *, where: str) -> Item:
    kind: Any = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        return read_part(AssistantItem, item, where=where)
    if kind == "item_reference" or (kind == "message" and "id" in item and "role" not in item):
        raise RequestError(
            f"{where}: items are not stored; send the item itself instead of a reference", param=f"{where}.id"
        )
    model = _MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"{where}: items of type {_shown(kind)} are not supported; give {', '.join(_MODELS)}", param=where
        )
    return read_part(model, item, where=where)


def _content_of(content: Text, *, where: str) -> str | list[dict[str, Any]]:
    """Return the content of an input message or of a call's output, in the form of chat messages."""
    if isinstance(content, str):
        return content
    parts = [_part(part, where=f"{where}[{index}]") for index, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _part(part: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": _string(part, "text", where=where)}
    if kind == "refusal":
        return {"type": "text", "text": _string(part, "refusal", where=where)}
    if kind != "input_image":
        raise _unsupported_part(part, where=where, instead="input_text or input_image")
    url = part.get("image_url")
    # Paths and other URLs are refused: they would make this machine read its files or send requests.
    if not isinstance(url, str) or not url.startswith("data:"):
        raise RequestError(
            f"{where}.image_url: only images inside the request are supported; give a data URL", param=where
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant_text(content: Text, *, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        name = "refusal" if part.get("type") == "refusal" else "text"
        if part.get("type") not in ("output_text", "input_text", "text", "refusal"):
            raise _unsupported_part(part, where=f"{where}[{index}]", instead="output_text")
        texts.append(_string(part, name, where=f"{where}[{index}]"))
    return "".join(texts)


def _reasoning_text(item: ReasoningInput, *, where: str) -> str:
    """Return the text of a reasoning item: its encrypted content, else its content, else its summary."""
    hidden = None if item.encrypted_content is None else read_encrypted(item.encrypted_content)
    if hidden is not None:
        return hidden
    parts, name = (item.content, "content") if item.content else (item.summary, "summary")
    if not parts and item.encrypted_content:
        raise RequestError(
            f"{where}.encrypted_content was not written by this server; leave the item out",
            param=f"{where}.encrypted_content",
        )
    texts = [_string(part, "text", where=f"{where}.{name}[{i}]") for i, part in enumerate(parts or ())]
    return "\n".join(texts)


def _function_arguments(item: FunctionCallInput, *, where: str) -> dict[str, Any]:
    try:
        arguments: Any = decode_json(item.arguments) if item.arguments.strip() else {}
    except JsonFault as error:
        raise RequestError(
            f"{where}.arguments is not valid JSON: {error}", param=f"{where}.arguments"
        ) from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.arguments must hold a JSON object", param=f"{where}.arguments")
    return cast(dict[str, Any], arguments)


def _unsupported_part(part: Mapping[str, Any], *, where: str, instead: str) -> RequestError:
    shown = _shown(part.get("type"))
    return RequestError(f"{where}: parts of type {shown} are not supported; give {instead}", param=where)


def _string(part: Mapping[str, Any], name: str, *, where: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def _shown(value: Any) -> str:
    return one_line(json.dumps(value), max_length=80)


_ENCRYPTED = "agent-loop-reasoning-1:"


def write_encrypted(reasoning: str) -> str:
    """Return a token that carries reasoning through clients, which send it back.

    OpenAI encrypts reasoning, because its clients may not read it. Here, the client is the program under training. The
    token is an encoding, not a cipher.
    """
    return _ENCRYPTED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def read_encrypted(token: str) -> str | None:
    """Return the reasoning text of a token; None if another server wrote the token."""
    if not token.startswith(_ENCRYPTED):
        return None
    try:
        return base64.b64decode(token.removeprefix(_ENCRYPTED), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


# -- translation -------------------------------------------------------------------------------------------------------


class CallRecord:
    """Calls that the model made, by their ids. Old calls are forgotten when there are too many."""

    def __init__(self, *, max_calls: int = 65536) -> None:
        self._max_calls = max_calls
        self._turns: OrderedDict[str, set[str]] = OrderedDict()
        """Responses with a call of this id. Some models give the same ids in every turn."""
        self._arguments: dict[str, dict[str, Mapping[str, Any]]] = {}

    def add(
        self, call_id: str, *, response_id: str, text: str = "", arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Add a call of a response.

        Args:
            call_id: Id of the call.
            response_id: Id of the response.
            text: What the client sees as the input of a custom tool.
            arguments: Arguments of a custom tool, if they are not the text alone.
        """
        self._turns.setdefault(call_id, set()).add(response_id)
        if arguments is not None:
            self._arguments.setdefault(call_id, {})[text] = arguments
        if len(self._turns) > self._max_calls:
            oldest, _ = self._turns.popitem(last=False)
            self._arguments.pop(oldest, None)

    def are_of_one_turn(self, call_ids: Sequence[str]) -> bool:
        """Return whether one response has all of these calls."""
        none: set[str] = set()
        first, *others = (self._turns.get(call_id, none) for call_id in call_ids)
        return bool(first.intersection(*others))

    def custom_arguments(self, call_id: str, text: str) -> Mapping[str, Any] | None:
        """Return the arguments of a call of a custom tool, if they are not the text alone."""
        return self._arguments.get(call_id, {}).get(text)


@dataclass(frozen=True, slots=True)
class TranslatedResponse:
    """Request of the Responses API as a chat request."""

    request: ResponsesRequest
    chat: ChatCompletionRequest
    tools: Tools


def translate_response(
    request: ResponsesRequest, *, calls: CallRecord, wishes: Collection[str] = ()
) -> TranslatedResponse:
    """Translate a request.

    Args:
        request: The request.
        calls: Calls that the model made.
        wishes: Hosted tools that the request may do without, by names such as `tools.web_search`.
    """
    given = request.input or ()
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    items = [(f"input[{i}]", _read_item(item, where=f"input[{i}]")) for i, item in enumerate(given)]
    more = [tool for _, item in items if isinstance(item, AdditionalTools) for tool in item.tools]
    tools = read_tools([*(request.tools or ()), *more], wishes=wishes)
    placed = [(where, item) for where, item in items if not isinstance(item, AdditionalTools)]
    messages = _messages_of(placed, calls=calls)
    return TranslatedResponse(request, _chat_request(request, messages, tools), tools)


def renamed(error: RequestError) -> RequestError:
    """Return an error about a chat request with the names of this API."""
    first, dot, rest = (error.param or "").partition(".")
    base, bracket, index = first.partition("[")
    name = _CHAT_NAMES.get(base)
    if name is None:
        return error
    param = f"{name}{bracket}{index}{dot}{rest}"
    return RequestError(str(error).replace(error.param or "", param, 1), param=param, code=error.code)


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
        "verbosity": None if request.text is None else request.text.verbosity,
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


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") != "json_schema":
        return dict(wanted)
    schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _messages_of(items: Sequence[tuple[str, Item]], *, calls: CallRecord) -> list[dict[str, Any]]:
    """Return the messages of a chat request. Each item comes with its place in the request."""
    messages: list[dict[str, Any] | _Turn] = []
    turn: _Turn | None = None
    is_open = False
    for position, (where, item) in enumerate(items):
        if isinstance(item, MODEL_ITEMS):
            if turn is not None and turn.has_later_call(item, is_open=is_open, calls=calls):
                pass  # the client wrote the result of each call right after the call
            elif turn is None or not is_open or turn.ends_before(item, items[position + 1 :]):
                turn, is_open = _Turn(), True
                messages.append(turn)
            turn.add(item, where=where, calls=calls)
        else:
            is_open = False
            if not isinstance(item, CallOutput):
                turn = None
            messages.append(_message(item, where=where))
    return [message.message() if isinstance(message, _Turn) else message for message in messages]


def _message(item: Item, *, where: str) -> dict[str, Any]:
    if isinstance(item, CallOutput):
        content = _content_of(item.output, where=f"{where}.output")
        return {"role": "tool", "tool_call_id": item.call_id, "content": content}
    assert isinstance(item, MessageItem)
    return {"role": item.role, "content": _content_of(item.content, where=f"{where}.content")}


@dataclass(slots=True)
class _Turn:
    """Turn of the model while its items are read."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def ends_before(self, item: _ModelItem, following: Sequence[tuple[str, Item]]) -> bool:
        """Return whether an item belongs to the next turn, because this turn has a message already."""
        if isinstance(item, AssistantItem):
            return bool(self.texts)
        if not isinstance(item, ReasoningInput) or not (self.texts or self.calls):
            return False
        after = next((each for _, each in following if not isinstance(each, ReasoningInput)), None)
        return isinstance(after, AssistantItem)

    def has_later_call(self, item: _ModelItem, *, is_open: bool, calls: CallRecord) -> bool:
        """Return whether an item that follows results of this turn's calls is another call of this turn."""
        if is_open or not isinstance(item, FunctionCallInput | CustomCallInput) or not self.calls:
            return False
        ids = [str(call["id"]) for call in self.calls]
        return item.call_id not in ids and calls.are_of_one_turn([*ids, item.call_id])

    def add(self, item: _ModelItem, *, where: str, calls: CallRecord) -> None:
        if isinstance(item, AssistantItem):
            self.texts.append(_assistant_text(item.content, where=f"{where}.content"))
        elif isinstance(item, ReasoningInput):
            self.reasoning.append(_reasoning_text(item, where=where))
        else:
            name, arguments = chat_name(item.name, item.namespace), _arguments(item, where, calls)
            function = {"name": name, "arguments": arguments}
            self.calls.append({"type": "function", "id": item.call_id, "function": function})

    def message(self) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": "".join(self.texts),
            **({"reasoning_content": "".join(self.reasoning)} if self.reasoning else {}),
            **({"tool_calls": self.calls} if self.calls else {}),
        }


def _arguments(item: _CallItem, where: str, calls: CallRecord) -> Mapping[str, Any]:
    if isinstance(item, FunctionCallInput):
        return _function_arguments(item, where=where)
    sampled = calls.custom_arguments(item.call_id, item.input)
    return {CUSTOM_INPUT: item.input} if sampled is None else sampled
