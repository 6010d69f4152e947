"""Tools as verl's code writes them, and as its loops call them."""

from __future__ import annotations

import copy
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from agent_loop.tools import base
from agent_loop.tools.registry import load_tools
from agent_loop.tools.results import read_result


class OpenAIFunctionToolSchema(dict[str, Any]):
    """A tool's schema: a dict whose fields are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return OpenAIFunctionToolSchema(cast(Mapping[str, Any], value)) if isinstance(value, dict) else value

    @classmethod
    def model_validate(cls, schema: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
        """The schema of a mapping."""
        return cls(schema)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """A copy as plain dicts, which holds what was set and nothing else, whatever the options."""
        return copy.deepcopy(dict(self))


class _TakesSchema(ABCMeta):
    def __call__(cls: Any, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> Any:
        return super().__call__(dict(config), OpenAIFunctionToolSchema(tool_schema))


class BaseTool(base.BaseTool, metaclass=_TakesSchema):
    """`agent_loop.BaseTool` whose `tool_schema` has attributes."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        super().__init__(config, tool_schema)
        self.tool_schema = OpenAIFunctionToolSchema(tool_schema)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Its schema."""
        return OpenAIFunctionToolSchema(self.tool_schema)


class ToolText(str):
    """A tool's answer: its text, with the fields of `ToolResponse`."""

    def __new__(cls, response: base.ToolResponse) -> ToolText:
        return super().__new__(cls, response.text or "")

    def __init__(self, response: base.ToolResponse) -> None:
        self.text = response.text
        self.image = response.image
        self.video = response.video


class LoadedTool:
    """A tool as verl's loops call it. What else it has is the tool's own."""

    def __init__(self, tool: base.BaseTool) -> None:
        self.tool = tool
        self.tool_schema = OpenAIFunctionToolSchema(tool.tool_schema)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Sets up an instance and returns its id, a new one if none is given."""
        instance_id = instance_id or uuid4().hex
        await self.tool.create(instance_id, **kwargs)
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolText, float | None, dict[str, Any]]:
        """Runs one call.

        Raises:
            ToolBug: What it returned is no result.
        """
        result = read_result(await self.tool.execute(instance_id, parameters, **kwargs), name=self.tool.name)
        return ToolText(result.response), result.reward, dict(result.extra)


def initialize_tools_from_config(tools_config_file: str | Path) -> Sequence[LoadedTool]:
    """The tools of a YAML file.

    Raises:
        ConfigError: One cannot be loaded.
    """
    return [LoadedTool(tool) for tool in load_tools([], config_path=tools_config_file).values()]
