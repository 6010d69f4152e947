"""Requests of the Responses API, translated to chat requests.

A turn of the model is several items: reasoning, a message, calls. They are one assistant message.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.serve.chat_requests import (
    ChatCompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    LenientModel,
    TextFormat,
)
from agent_loop.serve.fields import DataUrl, FiniteFloat, RequestModel, ToolName, only
from agent_loop.serve.responses_tools import (
    CUSTOM_INPUT,
    Tool,
    ToolChoice,
    ToolOrigin,
    chat_name,
    declared_tools,
)

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
CallId = Annotated[str, Field(min_length=1, max_length=256)]


# -- items -------------------------------------------------------------------------------------------------------------


class TextPart(LenientModel):
    type: Literal["input_text", "output_text", "text"]
    text: str

    def as_part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class RefusalPart(LenientModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal

    def as_part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.refusal}


class ImagePart(LenientModel):
    type: Literal["input_image"]
    image_url: DataUrl

    def as_part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


class ReasoningPart(LenientModel):
    text: str


InputContent: TypeAlias = (
    str | list[Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]]
)
OutputContent: TypeAlias = str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]


def _chat_content(content: InputContent) -> str | list[dict[str, Any]]:
    """Return the content of an input message or of a call's output, in the form of chat messages."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and not isinstance(content[0], ImagePart):
        return content[0].text
    return [part.as_part() for part in content]


class InputItem(RequestModel):
    ignored = ("status",)

    id: Annotated[str, Field(max_length=256)] | None = None


class MessageItem(InputItem):
    ignored = ("status", "phase")

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: InputContent

    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": _chat_content(self.content)}


class CallOutput(InputItem):
    ignored = ("status", "name", "namespace", "caller")

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: InputContent

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _chat_content(self.output)}


class AdditionalTools(InputItem):
    """More tools. They are declared in the prompt together with the request's own tools."""

    type: Literal["additional_tools"]
    role: Literal["developer"] | None = None
    tools: list[Tool]


class AssistantItem(LenientModel):
    role: Literal["assistant"]
    content: OutputContent

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ReasoningItem(LenientModel):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """Text of the encrypted content, else of the content, else of the summary."""
        hidden = read_encrypted(self.encrypted_content or "")
        return (
            "\n".join(part.text for part in self.content or self.summary or ()) if hidden is None else hidden
        )

    @model_validator(mode="after")
    def _is_readable(self) -> ReasoningItem:
        token = self.encrypted_content
        if token and not self.content and not self.summary and read_encrypted(token) is None:
            raise ValueError("encrypted_content was not written by this server; leave the item out")
        return self


def _read_arguments(text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError("give a string with a JSON object")
    try:
        arguments: Any = decode_json(text) if text.strip() else {}
    except JsonFault as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError("it must hold a JSON object")
    return cast(Any, arguments)


class CallItem(LenientModel):
    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments)]

    def sampled_arguments(self, calls: CallRecord) -> Mapping[str, Any]:
        return self.arguments


class CustomCallItem(CallItem):
    type: Literal["custom_tool_call"]
    input: str

    def sampled_arguments(self, calls: CallRecord) -> Mapping[str, Any]:
        sampled = calls.custom_arguments(self.call_id, self.input)
        return {CUSTOM_INPUT: self.input} if sampled is None else sampled


def _refuse_reference(value: Any) -> Any:
    raise ValueError("items are not stored; send the item itself instead of a reference")


class ItemReference(LenientModel):
    """Item of an earlier response. Refused, because items are not stored."""

    id: Annotated[Any, AfterValidator(_refuse_reference)]


def _kind_of_item(item: Any) -> str:
    fields = cast(Mapping[str, Any], item if isinstance(item, Mapping) else {})
    kind = fields.get("type") or "message"
    if kind != "message":
        return str(kind)
    if "id" in fields and "role" not in fields:
        return "item_reference"
    return "assistant" if fields.get("role") == "assistant" else "message"


_ModelItem: TypeAlias = AssistantItem | ReasoningItem | FunctionCallItem | CustomCallItem
MODEL_ITEMS = (AssistantItem, ReasoningItem, FunctionCallItem, CustomCallItem)
Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[AssistantItem, Tag("assistant")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of_item),
]

# -- the request -------------------------------------------------------------------------------------------------------


class ReasoningOptions(RequestModel):
    """How the model reasons, and how its reasoning is returned."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    """Same as `reasoning_effort` of chat requests."""
    summary: SummaryKind | None = None
    """If set, the whole reasoning is returned as the summary instead of as content."""
    generate_summary: SummaryKind | None = None
    """Older name of `summary`."""
    context: Annotated[Any, only("auto", "all_turns")] = None
    """Reasoning of earlier turns stays in the conversation as far as the client sends it."""
    mode: Annotated[Any, only("standard")] = None


class ResponsesSchemaFormat(JsonSchemaFormat):
    type: Literal["json_schema"]

    def as_chat(self) -> dict[str, Any]:
        schema = self.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}


class TextOptions(RequestModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect."""


class ResponsesStreamOptions(RequestModel):
    ignored = ("include_obfuscation",)


def _refuse_stored(value: Any) -> Any:
    if value:
        raise ValueError("responses are not stored; send the whole conversation as input")
    return value


Stored = Annotated[Any, AfterValidator(_refuse_stored)]
"""Field that asks for a stored response."""


class ResponsesRequest(RequestModel):
    """Body of `/v1/responses`."""

    # max_tool_calls limits the calls of hosted tools only, which are not supported.
    ignored = (
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("service_tier", "max_tool_calls", "client_metadata"),
    )

    names_here = {  # noqa: RUF012  (pydantic's ClassVar of the base class)
        "functions": "tools",
        "logprobs": "include",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "system": "instructions",
        "verbosity": "text.verbosity",
    }

    model: str
    input: str | list[Item] | None = None
    """Text of a user message, or items: messages, calls, outputs of calls and reasoning."""
    instructions: str | None = None
    """System message before the conversation."""
    previous_response_id: Stored = None
    store: Stored = None
    background: Stored = None
    include: list[Includable] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Annotated[Any, only("disabled")] = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    """Returned unchanged."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None

    context_management: Annotated[Any, only([])] = None

    @property
    def has_reasoning_summary(self) -> bool:
        options = self.reasoning
        return options is not None and bool(options.summary or options.generate_summary)

    def includes(self, name: Includable) -> bool:
        """Return whether the response should include this additional output."""
        return name in (self.include or ())


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
        """Add a call of a response, with the arguments of a custom tool if they are not the text alone."""
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
    origins: Mapping[str, ToolOrigin]
    """Declaration of each tool, by its name in the chat request."""


def translate_response(request: ResponsesRequest, *, calls: CallRecord) -> TranslatedResponse:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    tools = list(request.tools or ())
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    elif request.input:
        items = [item for item in request.input if not isinstance(item, AdditionalTools | ItemReference)]
        messages += _messages_of(items, calls=calls)
        tools += [tool for i in request.input if isinstance(i, AdditionalTools) for tool in i.tools]
    functions, origins = declared_tools(tools)
    has_logprobs = request.includes("message.output_text.logprobs") or bool(request.top_logprobs)
    choice, text = request.tool_choice, request.text or TextOptions()
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": functions or None,
        "tool_choice": choice if choice is None or isinstance(choice, str) else choice.as_chat(),
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": has_logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "verbosity": text.verbosity,
        "response_format": None if text.format is None else text.format.as_chat(),
        "stream": request.stream,
    }
    return TranslatedResponse(request, ChatCompletionRequest.read(fields), origins)


def _messages_of(
    items: Sequence[MessageItem | CallOutput | _ModelItem], *, calls: CallRecord
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    is_open = False
    for position, item in enumerate(items):
        if not isinstance(item, MODEL_ITEMS):
            is_open = False
            if not isinstance(item, CallOutput):
                turn = None
            messages.append(item.message())
            continue
        # A client may have written the result of each call right after the call.
        is_late = turn is not None and not is_open and _is_call_of(turn, item, calls=calls)
        if turn is None or not (is_open or is_late) or (is_open and _ends(turn, items[position:])):
            turn, is_open = {"role": "assistant"}, True
            messages.append(turn)
        _add(turn, item, calls=calls)
    return [message if "content" in message else {**message, "content": ""} for message in messages]


def _ends(turn: Mapping[str, Any], items: Sequence[RequestModel]) -> bool:
    """Return whether the first of the items belongs to the next turn, because this turn has a message already."""
    if isinstance(items[0], AssistantItem):
        return "content" in turn
    if not isinstance(items[0], ReasoningItem) or not ("content" in turn or "tool_calls" in turn):
        return False
    return isinstance(
        next((each for each in items if not isinstance(each, ReasoningItem)), None), AssistantItem
    )


def _is_call_of(turn: Mapping[str, Any], item: _ModelItem, *, calls: CallRecord) -> bool:
    """Return whether an item that follows results of a turn's calls is another call of the turn."""
    ids = [str(call["id"]) for call in turn.get("tool_calls", ())]
    if not ids or not isinstance(item, CallItem) or item.call_id in ids:
        return False
    return calls.are_of_one_turn([*ids, item.call_id])


def _add(turn: dict[str, Any], item: _ModelItem, *, calls: CallRecord) -> None:
    if isinstance(item, AssistantItem):
        turn["content"] = item.text
    elif isinstance(item, ReasoningItem):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text
    else:
        name, arguments = chat_name(item.name, item.namespace), item.sampled_arguments(calls)
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append(
            {"type": "function", "id": item.call_id, "function": function}
        )
