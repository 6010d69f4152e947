"""Tools of verl as tools of this package, and the loader of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.files.plain_values import read_yaml
from agent_loop.integrations.verl.manager.rows import current_record
from agent_loop.integrations.verl.manager.settings import load_verl
from agent_loop.integrations.verl.tools import LoadedTool
from agent_loop.loading import load_object
from agent_loop.tools import base
from agent_loop.tools.base import ArgumentChecking, ToolResponse
from agent_loop.tools.registry import VERL_NAMES, ToolEntry, create_tools


class ToolFromVerl(base.BaseTool):
    """A tool of verl, with verl's behaviour: created and released for each call, and truncated in characters."""

    check_arguments = ArgumentChecking.OFF

    def __init__(self, tool: Any, *, max_characters: int, side: str) -> None:
        super().__init__({}, tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True))
        self.tool = tool
        self._max_characters = max_characters
        self._side = side
        self._create_kwargs: dict[str, dict[str, Any]] = {}
        """Arguments of `create` by trajectory."""

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self._create_kwargs[instance_id] = kwargs

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._create_kwargs.pop(instance_id, None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        try:
            response, reward, extra = await self._call(parameters, self._create_kwargs.get(instance_id, {}))
        except Exception as error:  # noqa: BLE001  (the model reads it, as in verl)
            return ToolResponse(text=f"Error executing tool '{self.name}': {error}"), 0.0, {}
        text = self._truncated(response.text) if response.text else response.text
        return ToolResponse(text=text, image=response.image, video=response.video), reward, extra or {}

    async def _call(
        self, parameters: dict[str, Any], create_kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        if hasattr(self.tool, "fn"):  # a FunctionTool
            normalize = load_verl("verl.tools.function_tool:normalize_function_tool_return")
            return normalize(await self.tool.call(parameters))
        instance_id, _ = await self.tool.create(create_kwargs=dict(create_kwargs))
        try:
            record = current_record.get()
            agent_data = None if record is None else record.agent_data
            return await self.tool.execute(instance_id, parameters, agent_data=agent_data)
        finally:
            await self.tool.release(instance_id)

    def _truncated(self, text: str) -> str:
        limit = self._max_characters
        if len(text) <= limit:
            return text
        if self._side == "left":
            return "(truncated)..." + text[-limit:]
        if self._side == "right":
            return text[:limit] + "...(truncated)"
        half = limit // 2
        return text[:half] + "...(truncated)..." + text[-half:]


def load_tools(multi_turn: Any) -> tuple[dict[str, base.BaseTool], Sequence[Any]]:
    """Load the tools of `multi_turn.tool_config_path` and `function_tool_path` of verl's rollout.

    The file may also have tools of this package, and tools that earlier versions of verl shipped.

    Returns:
        The tools by name, and the same tools in verl's form.
    """
    resolve = load_verl("verl.utils.import_utils:resolve_config_path")
    loaded: list[Any] = []
    if multi_turn.tool_config_path:
        loaded += _load_file(resolve(multi_turn.tool_config_path))
    if multi_turn.get("function_tool_path"):
        loaded += load_verl("verl.tools.tool_registry:load_all_tools")(
            None, resolve(multi_turn.function_tool_path)
        )
    limits = {
        "max_characters": multi_turn.max_tool_response_length,
        "side": multi_turn.tool_response_truncate_side,
    }
    tools = [tool if isinstance(tool, base.BaseTool) else ToolFromVerl(tool, **limits) for tool in loaded]
    in_verl_form = [LoadedTool(tool) if isinstance(tool, base.BaseTool) else tool for tool in loaded]
    return {tool.name: tool for tool in tools}, in_verl_form


def _load_file(path: str) -> list[Any]:
    file = cast(Mapping[str, Any], read_yaml(path, what="multi_turn.tool_config_path: file"))
    loaded: list[Any] = []
    for index, entry in enumerate(cast(list[dict[str, Any]], file["tools"])):
        where = f"{path}: tools[{index}]"
        name = str(entry["class_name"])
        if name in VERL_NAMES or "." not in name or _is_own(load_object(name, key=f"{where}.class_name")):
            loaded += create_tools(ToolEntry.model_validate(entry), where=where)
        else:
            loaded.append(_create(load_object(name, key=where), entry))
    return loaded


def _is_own(named: Any) -> bool:
    return not isinstance(named, type) or issubclass(named, base.BaseTool)


def _create(tool_class: Any, entry: Mapping[str, Any]) -> Any:
    """Create a tool of verl as verl does."""
    schema = entry.get("tool_schema")
    if schema is not None:
        schema = load_verl("verl.tools.schemas:OpenAIFunctionToolSchema").model_validate(schema)
    return tool_class(config=dict(entry.get("config") or {}), tool_schema=schema)
