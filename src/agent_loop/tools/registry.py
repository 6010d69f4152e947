"""Loads the tools that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from agent_loop.config import Section
from agent_loop.errors import ConfigError
from agent_loop.loading import load_object
from agent_loop.registries import construct, load_class, read_entries
from agent_loop.tools.base import BaseTool
from agent_loop.tools.schema import check_tool_schema

REFERENCES_KEY = "rollout.multi_turn.tools"
PATH_KEY = "rollout.multi_turn.tool_config_path"


class ToolEntry(Section):
    """One tool of the YAML file."""

    class_name: str
    """A subclass of `BaseTool`, as `package.module.Class` or `file.py:Class`."""
    config: dict[str, Any] = Field(default={})
    """What the class gets as `config`."""
    tool_schema: dict[str, Any] | None = None
    """The OpenAI function schema; None where the class has an attribute `tool_schema`."""


def load_tools(references: Iterable[str], *, config_path: str | Path | None = None) -> dict[str, BaseTool]:
    """The tools by the names that models call them by.

    Args:
        references: `file.py:name` or `module:name` of functions decorated with `@function_tool`, of `BaseTool` objects,
            or of `BaseTool` subclasses with a class attribute `tool_schema` (made with an empty config).
        config_path: YAML that holds `tools: [{class_name, config, tool_schema}]`.

    Raises:
        ConfigError: A tool cannot be loaded, its schema is missing or invalid, or two have the same name.
    """
    tools: dict[str, BaseTool] = {}
    sources: dict[str, str] = {}
    loaded = [(reference, _load_reference(reference)) for reference in references]
    if config_path is not None:
        loaded += _load_file(config_path)
    for source, tool in loaded:
        check_tool_schema(tool.tool_schema, where=f"the schema of tool {source}")
        if tool.name in tools:
            raise ConfigError(
                f"tools {sources[tool.name]} and {source} are both named {tool.name!r}; rename one of them"
            )
        tools[tool.name], sources[tool.name] = tool, source
    return tools


def _load_reference(reference: str) -> BaseTool:
    named = load_object(reference, key=REFERENCES_KEY)
    if isinstance(named, BaseTool):
        return named
    if isinstance(named, type):
        tool_class = load_class(reference, base=BaseTool, key=REFERENCES_KEY)
        return _make(tool_class, config={}, tool_schema=None, where=f"{REFERENCES_KEY}: {reference}")
    if callable(named):
        raise ConfigError(
            f"{REFERENCES_KEY} is {reference!r}, a plain function; decorate it with @function_tool"
        )
    raise ConfigError(
        f"{REFERENCES_KEY} is {reference!r}, an object of type {type(named).__name__}; "
        "name a function decorated with @function_tool, or a subclass of BaseTool"
    )


def _load_file(path: str | Path) -> list[tuple[str, BaseTool]]:
    loaded: list[tuple[str, BaseTool]] = []
    entries = read_entries(path, entry_type=ToolEntry, list_key="tools", key=PATH_KEY)
    for index, entry in enumerate(entries):
        where = f"{path}: tools[{index}]"
        tool_class = load_class(entry.class_name, base=BaseTool, key=f"{where}.class_name")
        tool = _make(tool_class, config=entry.config, tool_schema=entry.tool_schema, where=where)
        loaded.append((f"{entry.class_name} ({where})", tool))
    return loaded


def _make(
    tool_class: type[BaseTool],
    *,
    config: Mapping[str, Any],
    tool_schema: Mapping[str, Any] | None,
    where: str,
) -> BaseTool:
    tool_schema = tool_schema or getattr(tool_class, "tool_schema", None)
    if not isinstance(tool_schema, Mapping):
        raise ConfigError(
            f"{where}: {tool_class.__name__} has no schema; give tool_schema in the YAML, "
            "or a class attribute tool_schema"
        )
    check_tool_schema(tool_schema, where=f"{where}: tool_schema")
    return construct(tool_class, config, tool_schema, where=where)
