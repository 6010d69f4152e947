"""Input items of the Responses API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

from pydantic import ConfigDict, Field, ValidationError

from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.completions.fields import Ignored, RequestModel
from agent_loop.completions.requests import request_error
from agent_loop.completions.responses.encrypted import read_encrypted
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line

ModelT = TypeVar("ModelT", bound=RequestModel)
Text: TypeAlias = str | list[dict[str, Any]]
_ItemId = Annotated[str, Field(max_length=256)] | None
_CallId = Annotated[str, Field(min_length=1, max_length=256)]
_Name = Annotated[str, Field(pattern=r"^\S+$", max_length=256)]


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


class ItemReference(RequestModel):
    """Reference to an item of a stored response or of its input."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, Field(max_length=256)]


Item: TypeAlias = (
    MessageItem
    | AssistantItem
    | ReasoningInput
    | FunctionCallInput
    | CustomCallInput
    | CallOutput
    | AdditionalTools
    | ItemReference
)
_MODELS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningInput,
    "function_call": FunctionCallInput,
    "custom_tool_call": CustomCallInput,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
    "additional_tools": AdditionalTools,
    "item_reference": ItemReference,
}


def read_item(item: Mapping[str, Any], *, where: str) -> Item:
    """Validate an item.

    Raises:
        RequestError: The type is not supported, or a field is unknown, missing or not valid.
    """
    return read_part(_model_of(item, where=where), item, where=where)


def read_part(model: type[ModelT], value: Mapping[str, Any], *, where: str) -> ModelT:
    """Validate a part of a request, and return it.

    Raises:
        RequestError: The value is not valid. The error names the field below `where`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as invalid:
        error = request_error(cast(Sequence[Mapping[str, Any]], invalid.errors()), known=model)
        name = where if not error.param else f"{where}.{error.param}"
        text = str(error).replace(error.param or "the body", name, 1)
        raise RequestError(text, param=name) from None


def content_of(content: Text, *, where: str) -> str | list[dict[str, Any]]:
    """Return the content of an input message or of a call's output, in the form of chat messages.

    Raises:
        RequestError: A part has an unsupported type.
    """
    if isinstance(content, str):
        return content
    parts = [_part(part, where=f"{where}[{index}]") for index, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def assistant_text(content: Text, *, where: str) -> str:
    """Return the text of an assistant's message.

    Raises:
        RequestError: A part is not a text.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        name = "refusal" if part.get("type") == "refusal" else "text"
        if part.get("type") not in ("output_text", "input_text", "text", "refusal"):
            raise _unsupported_part(part, where=f"{where}[{index}]", instead="output_text")
        texts.append(_string(part, name, where=f"{where}[{index}]"))
    return "".join(texts)


def reasoning_text(item: ReasoningInput, *, where: str) -> str:
    """Return the text of a reasoning item: its encrypted content, else its content, else its summary.

    Raises:
        RequestError: The item has only encrypted content, which this server did not write.
    """
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


def call_arguments(item: FunctionCallInput, *, where: str) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        RequestError: The arguments are not a JSON object.
    """
    try:
        arguments: Any = decode_json(item.arguments) if item.arguments.strip() else {}
    except JsonFault as error:
        raise RequestError(
            f"{where}.arguments is not valid JSON: {error}", param=f"{where}.arguments"
        ) from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.arguments must hold a JSON object", param=f"{where}.arguments")
    return cast(dict[str, Any], arguments)


def _model_of(item: Mapping[str, Any], *, where: str) -> type[Item]:
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if "id" in item and "role" not in item else "message"
    if kind == "message" and item.get("role") == "assistant":
        return AssistantItem
    model = _MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"{where}: items of type {_shown(kind)} are not supported; give message, reasoning, function_call, "
            "function_call_output, custom_tool_call, custom_tool_call_output or item_reference",
            param=where,
        )
    return model


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
