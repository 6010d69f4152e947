"""Loading of the tools that a configuration names, and their selection by rows."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, cast

from pydantic import Field

from agent_loop.config import NotNegative, Positive, PositiveSeconds, Section
from agent_loop.errors import ConfigError, DataError, did_you_mean
from agent_loop.loading import load_object
from agent_loop.registries import construct, load_class, read_entries
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import ArgumentChecking, BaseTool, check_declarations
from agent_loop.tools.schema import check_tool_schema

REFERENCES_KEY = "rollout.multi_turn.tools"
PATH_KEY = "rollout.multi_turn.tool_config_path"

BUILTIN_TOOLS = {
    "calculator": "agent_loop.tools.calculator:CalculatorTool",
    "edit_file": "agent_loop.workspaces.tools:EditFileTool",
    "gsm8k": "agent_loop.integrations.verl.gsm8k:Gsm8kTool",
    "http": "agent_loop.tools.web.http:HttpTool",
    "mcp": "agent_loop.tools.mcp.tools:mcp_tools",
    "openapi": "agent_loop.tools.web.openapi:openapi_tools",
    "python": "agent_loop.tools.python:PythonTool",
    "search": "agent_loop.tools.search.tool:SearchTool",
    "shell": "agent_loop.workspaces.tools:ShellTool",
    "workspace": "agent_loop.workspaces.tools:workspace_tools",
}
"""Built-in tools by short name. Each is imported when it is first used."""

VERL_NAMES = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "gsm8k",
    "verl.tools.mcp_base_tool.MCPBaseTool": "mcp",
    "verl.tools.mcp_search_tool.MCPSearchTool": "mcp",
    "verl.tools.search_tool.SearchTool": "search",
}
"""Built-in replacements for verl's tools, so that registry files written for verl can be used unchanged."""


class ToolEntry(Section):
    """Entry of the YAML file, which describes one or several tools."""

    class_name: str
    """Short name of a built-in tool, or `package.module.Class` or `file.py:Class`. The object is a subclass of
    `BaseTool`, a function decorated with `@function_tool`, or a function that takes `config` and returns tools."""
    config: dict[str, Any] = Field(default={})
    """Passed to the class as `config`."""
    tool_schema: dict[str, Any] | None = None
    """The OpenAI function schema; None where the class has an attribute `tool_schema`, or a method
    `get_openai_tool_schema` as verl's tools do."""
    mcp: dict[str, Any] = Field(default={})
    """More keys of the config of `mcp`, in verl's place."""
    on_replay: OnReplay | None = None
    """Overrides the tool's own value, as do the next four."""
    timeout_s: PositiveSeconds | None = None
    max_concurrent: Positive | None = None
    retries: NotNegative | None = None
    check_arguments: ArgumentChecking | None = None


def load_tools(references: Iterable[str], *, config_path: str | Path | None = None) -> dict[str, BaseTool]:
    """Load tools, and return them by the names that models call.

    Args:
        references: Short names of built-in tools, or `file.py:name` or `module:name` of functions decorated with
            `@function_tool`, of `BaseTool` objects, or of `BaseTool` subclasses with a class attribute `tool_schema`.
            A class gets an empty config.
        config_path: YAML file with `tools: [{class_name, config, tool_schema, ...}]`; the entries are `ToolEntry`.

    Raises:
        ConfigError: A tool cannot be loaded, its schema is missing or invalid, one of its limits is invalid, or two
            tools have the same name.
    """
    tools: dict[str, BaseTool] = {}
    sources: dict[str, str] = {}
    loaded = [(reference, _load_reference(reference)) for reference in references]
    if config_path is not None:
        entries = read_entries(config_path, entry_type=ToolEntry, list_key="tools", key=PATH_KEY)
        for index, entry in enumerate(entries):
            where = f"{config_path}: tools[{index}]"
            created = create_tools(entry, where=where)
            loaded += [(f"{entry.class_name} ({where})", tool) for tool in created]
    for source, tool in loaded:
        check_tool_schema(tool.tool_schema, where=f"the schema of tool {source}")
        check_declarations(tool)
        name = tool.tool_schema["function"]["name"]
        if tool.name != name:
            raise ConfigError(
                f"tool {source} has the name {tool.name!r}, but its schema has {name!r}, by which the model calls it; "
                "give both the same name"
            )
        if tool.name in tools:
            raise ConfigError(
                f"tools {sources[tool.name]} and {source} are both named {tool.name!r}; rename one of them"
            )
        tools[tool.name], sources[tool.name] = tool, source
    return tools


def create_tools(entry: ToolEntry, *, where: str) -> Sequence[BaseTool]:
    """Create the tools of one entry."""
    short_name = VERL_NAMES.get(entry.class_name, entry.class_name)
    reference = BUILTIN_TOOLS.get(short_name, entry.class_name)
    config = {**entry.config, **entry.mcp}
    if short_name in BUILTIN_TOOLS:
        config.pop("type", None)  # verl's `type: native | mcp`, which the class name says here
    elif ":" not in reference and "." not in reference:
        raise ConfigError(
            f"{where}.class_name is {reference!r}, not a built-in tool{did_you_mean(reference, BUILTIN_TOOLS)}"
        )
    named = load_object(reference, key=f"{where}.class_name")
    if isinstance(named, BaseTool):
        if config or entry.tool_schema:
            raise ConfigError(
                f"{where}: {reference} is an instance, which takes no config and no tool_schema; remove them"
            )
        tools: Sequence[BaseTool] = [named]
    elif callable(named) and not isinstance(named, type):
        made: Any = construct(cast(Any, named), config, where=where)
        tools = cast(list[Any], made) if isinstance(made, list) else []
        if not tools or not all(isinstance(tool, BaseTool) for tool in tools):
            raise ConfigError(
                f"{where}: its function returned {describe_value(made)}; return a list of BaseTool objects"
            )
    else:
        tool_class = load_class(reference, base=BaseTool, key=f"{where}.class_name")
        tools = [_create(tool_class, config=config, tool_schema=entry.tool_schema, where=where)]
    for tool in tools:
        for key in ("on_replay", "timeout_s", "max_concurrent", "retries", "check_arguments"):
            if getattr(entry, key) is not None:
                setattr(tool, key, getattr(entry, key))
    return tools


def _load_reference(reference: str) -> BaseTool:
    named = load_object(BUILTIN_TOOLS.get(reference, reference), key=REFERENCES_KEY)
    if isinstance(named, (BaseTool, type)):
        [tool] = create_tools(ToolEntry(class_name=reference), where=REFERENCES_KEY)
        return tool
    if reference in BUILTIN_TOOLS:
        raise ConfigError(
            f"{REFERENCES_KEY}: {reference} needs a config; add it to a file, and set {PATH_KEY} to the file"
        )
    raise ConfigError(
        f"{REFERENCES_KEY} is {reference!r}, an object of type {type(named).__name__}; "
        "name a function decorated with @function_tool, or a subclass of BaseTool"
    )


def _create(
    tool_class: type[BaseTool],
    *,
    config: Mapping[str, Any],
    tool_schema: Mapping[str, Any] | None,
    where: str,
) -> BaseTool:
    tool_schema = tool_schema or getattr(tool_class, "tool_schema", None)
    if isinstance(tool_schema, Mapping):
        check_tool_schema(tool_schema, where=f"{where}: tool_schema")
        tool_schema = tool_class.schema_type(tool_schema)
    elif not hasattr(tool_class, "get_openai_tool_schema"):
        raise ConfigError(
            f"{where}: {tool_class.__name__} has no schema; give tool_schema in the YAML, "
            "or a class attribute tool_schema"
        )
    tool = construct(cast(Any, tool_class), config, tool_schema, where=where)
    if not isinstance(getattr(tool, "tool_schema", None), Mapping):
        raise ConfigError(
            f"{where}: {tool_class.__name__} did not set tool_schema; call super().__init__ in its constructor"
        )
    return tool


def read_selection(selection: Any, *, known: Collection[str], where: str) -> list[str] | None:
    """Return the names in a row's `tool_selection`, or None if the row has none and thereby selects all tools."""
    if selection is None:
        return None
    is_list = isinstance(selection, Iterable) and not isinstance(selection, (str, bytes, Mapping))
    names: list[Any] = list(cast(Iterable[Any], selection)) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where} is {describe_value(selection)}; give a list of tool names")
    for name in names:
        if name not in known:
            raise DataError(f"{where}: there is no tool {name!r}{did_you_mean(name, known)}")
    if len(set(names)) < len(names):
        raise DataError(f"{where} is {names}; list each tool once")
    return names


def select_tools(tools: Mapping[str, BaseTool], selection: Any, *, where: str) -> Mapping[str, BaseTool]:
    """Return the tools that a row selects, in its order. Only these are shown to the model and can be called."""
    names = read_selection(selection, known=tools, where=where)
    return tools if names is None else {name: tools[name] for name in names}


def kwargs_of_selected(
    tools_kwargs: Mapping[str, Any] | None, *, tools: Mapping[str, BaseTool], known: Collection[str]
) -> dict[str, Any]:
    """Return a row's `tools_kwargs` without those of known tools that the row did not select.

    A table has a value of every column in every row, also for tools that the row does not use.
    """
    return {
        name: groups for name, groups in (tools_kwargs or {}).items() if name in tools or name not in known
    }


def with_row_columns(
    tools_kwargs: Mapping[str, Any], *, tools: Mapping[str, BaseTool], row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `tools_kwargs` with the columns of the row that the tools ask for, in their `create_kwargs`.

    Values that the row gives for one tool alone take precedence over its columns.
    """
    merged = dict(tools_kwargs)
    for name, tool in tools.items():
        columns = {column: row[column] for column in tool.row_columns if row.get(column) is not None}
        if columns:
            groups: Mapping[str, Any] = merged.get(name) or {}
            merged[name] = {**groups, "create_kwargs": {**columns, **(groups.get("create_kwargs") or {})}}
    return merged


def expand_variables(values: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Return the values with each `$NAME` replaced by that environment variable; `$$` is a dollar sign."""
    read: dict[str, str] = {}
    for key, value in values.items():
        try:
            read[key] = Template(value).substitute(os.environ)
        except KeyError as error:
            raise ConfigError(
                f"{where}.{key} needs the environment variable {error.args[0]}, which is not set; set it"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"{where}.{key} is not a valid template: {error}; write $NAME, or $$ for a dollar sign"
            ) from error
    return read
