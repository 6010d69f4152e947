"""Tools of the Responses API as functions of chat requests."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from agent_loop.errors import RequestError, UnsupportedParameter
from agent_loop.runtime.describe import one_line
from agent_loop.serve.chat_requests import Ignored, Only, RequestModel, read_part

CUSTOM_INPUT = "input"
"""Parameter of the function that stands for a custom tool."""
_Name = Annotated[str, Field(pattern=r"^\S+$", max_length=128)]


class ClientTool(RequestModel):
    """Tool that the client runs."""

    name: _Name
    description: str | None = None
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None
    async_: Annotated[Any, Only(False), Field(alias="async")] = None


class FunctionTool(ClientTool):
    """Function with a JSON schema."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Ignored = None


class CustomTool(ClientTool):
    """Tool whose input is a free text."""

    type: Literal["custom"]
    format: dict[str, Any] | None = None
    """`{"type": "text"}`, or a grammar, which is shown to the model and not enforced."""


class NamespaceTool(RequestModel):
    """Group of tools."""

    type: Literal["namespace"]
    name: _Name
    description: str | None = None
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """How the client declared a function of the chat request."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of a request."""

    functions: Sequence[dict[str, Any]] = ()
    """Tools of the chat request."""
    origins: Mapping[str, ToolOrigin] = field(default_factory=dict[str, ToolOrigin])
    """Declaration of each function, by its name in the chat request."""
    dropped: Sequence[str] = ()
    """Names such as `tools.web_search` of hosted tools that the request may do without."""

    def origin(self, chat_name: str) -> ToolOrigin:
        """Return the declaration of a function that the model called."""
        return self.origins.get(chat_name) or ToolOrigin(chat_name)


def read_tools(tools: Sequence[Mapping[str, Any]] | None, *, wishes: Collection[str] = ()) -> Tools:
    """Return the functions that stand for the tools of a request.

    Args:
        tools: Tools of the request.
        wishes: Hosted tools that are dropped, by names such as `tools.web_search`.
    """
    functions: list[dict[str, Any]] = []
    origins: dict[str, ToolOrigin] = {}
    hosted = [f"tools.{tool.get('type')}" for tool in tools or ()]
    dropped = [name for name in hosted if name in wishes]
    kept = [(index, tool) for index, tool in enumerate(tools or ()) if hosted[index] not in wishes]
    for where, function, origin in _declared(kept, where="tools"):
        name = function["name"]
        if name in origins:
            raise RequestError(
                f"{where}.name: {name!r} is the name of an earlier tool; change it", param=where
            )
        origins[name] = origin
        functions.append({"type": "function", "function": function})
    return Tools(functions, origins, dropped)


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in the chat request."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """Return the `tool_choice` of the chat request."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "allowed_tools":
        return _named_tool(choice)
    tools: Any = choice.get("tools")
    named = [_named_tool(tool) for tool in cast(list[Any], tools)] if isinstance(tools, list) else []
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named}}


def _named_tool(tool: Any) -> dict[str, Any]:
    fields = cast(dict[str, Any], tool if isinstance(tool, dict) else {})
    name, namespace = fields.get("name"), fields.get("namespace")
    if fields.get("type") in ("function", "custom") and isinstance(name, str):
        return {
            "type": "function",
            "function": {"name": chat_name(name, namespace if isinstance(namespace, str) else None)},
        }
    shown = one_line(json.dumps(tool), max_length=80)
    raise RequestError(
        f"tool_choice: {shown} is not supported; give auto, none, required, a function or custom tool by name, or "
        "allowed_tools with such names",
        param="tool_choice",
    )


def _declared(
    tools: Iterable[tuple[int, Mapping[str, Any]]], *, where: str, group: NamespaceTool | None = None
) -> Iterator[tuple[str, dict[str, Any], ToolOrigin]]:
    """Yield each function with its place in the request and its declaration."""
    namespace = None if group is None else group.name
    for index, tool in tools:
        place = f"{where}[{index}]"
        kind = tool.get("type")
        if kind == "function":
            function = read_part(FunctionTool, tool, where=place)
            origin = ToolOrigin(function.name, namespace)
            yield place, _function(function, group=None if index else group, namespace=namespace), origin
        elif kind == "custom":
            custom = read_part(CustomTool, tool, where=place)
            origin = ToolOrigin(custom.name, namespace, is_custom=True)
            yield place, _custom_function(custom, group=None if index else group, namespace=namespace), origin
        elif kind == "namespace" and group is None:
            inner = read_part(NamespaceTool, tool, where=place)
            yield from _declared(enumerate(inner.tools), where=f"{place}.tools", group=inner)
        else:
            raise _unsupported_tool(kind, where=place)


def _function(tool: FunctionTool, *, group: NamespaceTool | None, namespace: str | None) -> dict[str, Any]:
    """Return the function of the chat request. The first function of a group carries the group's description."""
    return {
        "name": chat_name(tool.name, namespace),
        **_description(tool, group=group),
        **({} if tool.parameters is None else {"parameters": tool.parameters}),
        **({} if tool.strict is None else {"strict": tool.strict}),
    }


def _custom_function(
    tool: CustomTool, *, group: NamespaceTool | None, namespace: str | None
) -> dict[str, Any]:
    """Return a function with one string parameter, whose description holds the grammar of the tool's input."""
    text: dict[str, Any] = {"type": "string", "description": _input_description(tool.format or {})}
    return {
        "name": chat_name(tool.name, namespace),
        **_description(tool, group=group),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
    }


def _input_description(text_format: Mapping[str, Any]) -> str:
    definition = text_format.get("definition")
    if text_format.get("type") != "grammar" or not isinstance(definition, str):
        return "The input of the tool, as plain text."
    syntax = text_format.get("syntax")
    return f"The input of the tool, as plain text that matches this {syntax} grammar:\n{definition}"


def _description(tool: ClientTool, *, group: NamespaceTool | None) -> dict[str, str]:
    texts = [text for text in (group and group.description, tool.description) if text]
    return {"description": "\n\n".join(texts)} if texts else {}


def _unsupported_tool(kind: Any, *, where: str) -> RequestError:
    shown = one_line(json.dumps(kind), max_length=80)
    return UnsupportedParameter(
        f"{where}: tools of type {shown} run on the servers of OpenAI, and are not available here; leave the tool out, "
        "or give tools of type function, custom or namespace",
        param=f"tools.{kind}" if isinstance(kind, str) else where,
    )
