"""Request fields that say what a completion must be: a call of a tool, or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema

from agent_loop.completions.fields import RequestModel
from agent_loop.tools.json_schema import InvalidSchema, check_json_schema

ANY_OBJECT = '{"type": "object"}'
"""JSON schema of `response_format: {"type": "json_object"}`."""


class FunctionName(RequestModel):
    """Name of a tool."""

    name: str


class NamedTool(RequestModel):
    """Tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    """Tools of the request that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(RequestModel):
    """Restricts the tools in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, Mapping):
        return str(cast(Mapping[str, Any], choice).get("type"))
    return str(getattr(choice, "type", "str"))


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("str")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice",
        custom_error_message='give "auto", "none", "required", or an object of type "function" or "allowed_tools"',
    ),
]


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        check_json_schema(schema)
    except (InvalidSchema, RecursionError) as error:
        raise ValueError(f"it is not a valid JSON schema: {error}") from error
    return schema


class JsonSchemaFormat(RequestModel):
    """Schema of a JSON answer."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[
        dict[str, Any],
        AfterValidator(_checked_schema),
        WithJsonSchema({"type": "object"}),
        Field(alias="schema"),
    ]
    strict: bool | None = None
    """Has no effect: an answer always has to match the schema."""


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")
]


def schema_text(response_format: TextFormat | JsonObjectFormat | SchemaFormat | None) -> str:
    """Return the JSON text of the schema that an answer must match; "" for any text."""
    if isinstance(response_format, SchemaFormat):
        return json.dumps(response_format.json_schema.schema_, ensure_ascii=False)
    return ANY_OBJECT if isinstance(response_format, JsonObjectFormat) else ""


def allowed_tools(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None) -> list[dict[str, Any]]:
    """Return the tools that the model sees: none for the choice `none`, and only those that the choice allows."""
    if choice == "none":
        return []
    if not isinstance(choice, AllowedToolsChoice):
        return [dict(tool) for tool in tools]
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    return [dict(tool) for tool in tools if tool["function"]["name"] in names]


def forces_call(choice: ToolChoice | None) -> bool:
    """Return whether the model must call a tool."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def unknown_tools(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None) -> list[str]:
    """Return the names in a choice that no tool of the request has."""
    known = {tool["function"]["name"] for tool in tools}
    if isinstance(choice, NamedTool):
        named = [choice]
    else:
        named = choice.allowed_tools.tools if isinstance(choice, AllowedToolsChoice) else []
    return [tool.function.name for tool in named if tool.function.name not in known]
