"""Base class, schemas and loader of tools with verl's interface."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast
from uuid import uuid4

from agent_loop.errors import ConfigError
from agent_loop.loops.agent_data import current_agent_data
from agent_loop.tools import base
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.registry import load_tools
from agent_loop.tools.results import read_result

VALUE_KEYWORDS = ("const", "default", "enum", "examples")
"""Keywords of a schema whose values are user data."""


class _AttributeDict(dict[str, Any]):
    """Dict whose keys are also attributes. Keys with None are dropped, as in verl's models."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(_without_none(dict[str, Any](*args, **fields)))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return OpenAIFunctionToolSchema(cast(Mapping[str, Any], value)) if type(value) is dict else value

    @classmethod
    def model_validate(cls, fields: Mapping[str, Any]) -> Self:
        """Return the schema of a mapping."""
        return cls(fields)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return a copy as plain dicts with the fields that were set. The options are ignored."""
        return copy.deepcopy(_plain(self))


class OpenAIFunctionToolSchema(_AttributeDict):
    """Schema of a tool: `type` and `function`."""


class OpenAIFunctionSchema(_AttributeDict):
    """`name`, `description` and `parameters` of a function."""


class OpenAIFunctionParametersSchema(_AttributeDict):
    """`type`, `properties` and `required` of a function's parameters."""


class OpenAIFunctionPropertySchema(_AttributeDict):
    """`type`, `description` and `enum` of one parameter."""


class BaseTool(base.BaseTool):
    """`agent_loop.BaseTool` with verl's interface.

    `tool_schema` has attributes, and may come from `get_openai_tool_schema`. `execute` has a default. `create` receives
    the row's `create_kwargs` as single arguments, and also as `create_kwargs` if it accepts that argument. `execute`
    receives the `agent_data` of the tool loop if it accepts that argument.
    """

    schema_type = OpenAIFunctionToolSchema

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None = None) -> None:
        schema: Any = tool_schema or self.get_openai_tool_schema()
        if hasattr(schema, "model_dump"):
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        if not isinstance(schema, Mapping):
            raise ConfigError(
                f"{type(self).__name__} has no schema; set tool_schema in the YAML, or define get_openai_tool_schema"
            )
        super().__init__(config, cast(Mapping[str, Any], schema))
        self.tool_schema = OpenAIFunctionToolSchema(cast(Mapping[str, Any], schema))
        own = cast(Any, self)
        if type(self).create is not base.BaseTool.create:
            own.create = partial(_create, self.create, inspect.signature(self.create).parameters)
        if _takes(inspect.signature(self.execute).parameters, "agent_data"):
            own.execute = partial(_execute, self.execute)

    def get_openai_tool_schema(self) -> Any:
        """Return the tool's schema. A subclass may define it instead of a `tool_schema` in the YAML."""
        return getattr(self, "tool_schema", None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return the default result of verl's base class."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}


async def _create(
    create: Callable[..., Awaitable[Any]],
    takes: Mapping[str, inspect.Parameter],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a tool's `create` with the arguments of the row, in the form that its signature accepts."""
    if not _takes(takes, "create_kwargs"):
        return await create(*args, **kwargs)
    known = {name: value for name, value in kwargs.items() if _takes(takes, name)}
    return await create(*args, **{"create_kwargs": kwargs, **known})


async def _execute(execute: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any) -> Any:
    return await execute(*args, **{"agent_data": current_agent_data.get(), **kwargs})


def _takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Return whether a function accepts a keyword argument."""
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class InstanceId(str):
    """Result of `create`: the instance id, which also unpacks as `instance_id, response`."""

    def __iter__(self) -> Iterator[Any]:
        yield str(self)
        yield ToolResponse()


class ToolText(str):
    """Text of a tool's response, with the fields of `ToolResponse`."""

    def __new__(cls, response: ToolResponse) -> ToolText:
        return super().__new__(cls, response.text or "")

    def __init__(self, response: ToolResponse) -> None:
        self.text = response.text
        self.image = response.image
        self.video = response.video


class LoadedTool:
    """Adapter of a tool with verl's calling convention. Other attributes are those of the tool."""

    def __init__(self, tool: base.BaseTool) -> None:
        self.tool = tool
        self.tool_schema = OpenAIFunctionToolSchema(tool.tool_schema)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)

    async def create(
        self,
        instance_id: str | None = None,
        *,
        create_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> InstanceId:
        """Create an instance and return its id: the id that the tool's `create` returned, if any."""
        instance_id = instance_id or uuid4().hex
        created: Any = await self.tool.create(instance_id, **{**(create_kwargs or {}), **kwargs})
        if isinstance(created, tuple) and created:
            created = cast(tuple[Any, ...], created)[0]
        return InstanceId(created if isinstance(created, str) else instance_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolText, float | None, dict[str, Any]]:
        """Run one call."""
        result = read_result(await self.tool.execute(instance_id, parameters, **kwargs), name=self.tool.name)
        return ToolText(result.response), result.reward, dict(result.extra)


def initialize_tools_from_config(tools_config_file: str | Path) -> Sequence[LoadedTool]:
    """Return the tools of a YAML file."""
    return [LoadedTool(tool) for tool in load_tools([], config_path=tools_config_file).values()]


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a schema without None fields. Values of keywords such as `default` are not changed."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name not in VALUE_KEYWORDS:
            kept[name] = (
                value if isinstance(value, _AttributeDict) else _without_none(cast(dict[str, Any], value))
            )
        elif value is not None or name == "const":
            kept[name] = value
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in cast(dict[str, Any], value).items()}
    return value
