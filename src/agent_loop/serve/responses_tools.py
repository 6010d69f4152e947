"""Tools of the Responses API as functions of chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field

from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.serve.fields import RequestModel, ToolName, only, unsupported, without_none

CUSTOM_INPUT = "input"
"""Parameter of the function that stands for a custom tool."""


class ClientTool(RequestModel):
    name: ToolName
    description: str | None = None
    defer_loading: Annotated[Any, only(False)] = None
    allowed_callers: Annotated[Any, only(["direct"])] = None
    async_: Annotated[Any, only(False), Field(alias="async")] = None

    def function(self) -> dict[str, Any]:
        """Return the function of the chat request, without its name and description."""
        raise NotImplementedError


class FunctionTool(ClientTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = None

    def function(self) -> dict[str, Any]:
        return without_none({"parameters": self.parameters, "strict": self.strict})


class CustomTool(ClientTool):
    """Tool whose input is a free text."""

    type: Literal["custom"]
    format: dict[str, Any] | None = None
    """`{"type": "text"}`, or a grammar, which is shown to the model and not enforced."""

    def function(self) -> dict[str, Any]:
        text: dict[str, Any] = {"type": "string", "description": self._input_description()}
        return {
            "parameters": {
                "type": "object",
                "properties": {CUSTOM_INPUT: text},
                "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            }
        }

    def _input_description(self) -> str:
        text_format = self.format or {}
        definition = text_format.get("definition")
        if text_format.get("type") != "grammar" or not isinstance(definition, str):
            return "The input of the tool, as plain text."
        syntax = text_format.get("syntax")
        return f"The input of the tool, as plain text that matches this {syntax} grammar:\n{definition}"


def _refuse_hosted(tool: Any) -> Any:
    kind: Any = cast(dict[str, Any], tool).get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom", "namespace"):
        raise unsupported(
            f"tools of type {one_line(kind, max_length=80)!r} run on the servers of OpenAI, and are not available "
            "here; leave the tool out, or give tools of type function, custom or namespace",
            wish=f"tools.{kind}",
        )
    return cast(Any, tool)


NamespacedTool: TypeAlias = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(RequestModel):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[NamespacedTool]


Tool: TypeAlias = Annotated[
    FunctionTool | CustomTool | NamespaceTool, Field(discriminator="type"), BeforeValidator(_refuse_hosted)
]


class ChosenTool(RequestModel):
    """Tool that the model must call."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool of the chat request."""
        return {"type": "function", "function": {"name": chat_name(self.name, self.namespace)}}


class AllowedTools(RequestModel):
    """Tools that the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[ChosenTool]

    def as_chat(self) -> dict[str, Any]:
        """Return the `tool_choice` of the chat request."""
        tools = [tool.as_chat() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


ToolChoice: TypeAlias = (
    Literal["auto", "none", "required"] | Annotated[ChosenTool | AllowedTools, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """How the client declared a function of the chat request."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def declared_tools(tools: Sequence[Tool]) -> tuple[list[dict[str, Any]], dict[str, ToolOrigin]]:
    """Return the tools of the chat request, and the declaration of each by its name there.

    The first function of a namespace carries the namespace's description.
    """
    functions: list[dict[str, Any]] = []
    origins: dict[str, ToolOrigin] = {}
    for tool in tools:
        inner = tool.tools if isinstance(tool, NamespaceTool) else [tool]
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for index, each in enumerate(inner):
            name = chat_name(each.name, namespace)
            if name in origins:
                raise RequestError(
                    f"tools: {name!r} is the name of several tools; change one of them", param="tools"
                )
            texts = [each.description] if each is tool or index else [tool.description, each.description]
            description = "\n\n".join(text for text in texts if text)
            more = {"description": description} if description else {}
            functions.append({"type": "function", "function": {"name": name, **more, **each.function()}})
            origins[name] = ToolOrigin(each.name, namespace, isinstance(each, CustomTool))
    return functions, origins


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in the chat request."""
    return name if namespace is None else f"{namespace}__{name}"
