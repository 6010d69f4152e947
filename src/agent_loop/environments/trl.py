"""Environments in the form of TRL's `environment_factory`: a class whose public methods are the model's tools.

```python
class Counter:
    def reset(self, **row) -> str | None:
        self.count = 0
        return "The counter stands at 0."

    def add(self, amount: int) -> int:
        \"\"\"Adds to the counter.

        Args:
            amount: How much.
        \"\"\"
        self.count += amount
        return self.count

    def get_reward(self) -> float:
        return float(self.count == 3)
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.environments.base import Environment, EnvironmentTool, RewardValue
from agent_loop.errors import ConfigError, EnvironmentBug, EnvironmentUnavailable, ToolError
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.threads import OneThread
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.signature import function_schema
from agent_loop.types import Message

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
OWN_COLUMNS = frozenset({"raw_prompt", "agent_name", "environment", "tools_kwargs", "interaction_kwargs"})
"""Columns that the loop reads. `reset` gets all other columns."""


class TrlClass:
    """A class in TRL's form, and its tools."""

    def __init__(self, make: Callable[[], Any], probe: Any, *, where: str) -> None:
        self.make = make
        self.where = where
        self.name = type(probe).__name__
        functions = dict(inspect.getmembers(cast(Any, type(probe)), predicate=inspect.isfunction))
        if "reset" not in functions:
            raise ConfigError(f"{where}: {self.name} has no method reset; write one")
        self.has_reward = "get_reward" in functions
        self.tools = tuple(
            EnvironmentTool(function_schema(getattr(probe, name), name=name))
            for name in functions
            if name not in NOT_TOOLS and not name.startswith("_")
        )
        self.on_replay = OnReplay(getattr(probe, "on_replay", OnReplay.RESTART))

    def environment(self) -> TrlEnvironment:
        """Return the environment of one trajectory. `reset` creates its instance."""
        return TrlEnvironment(self)


class TrlEnvironment(Environment):
    """Instance of a class in TRL's form. Exceptions of its tools are reported to the model."""

    def __init__(self, trl_class: TrlClass) -> None:
        self.on_replay = trl_class.on_replay
        self._class = trl_class
        self._instance: Any = None
        self._thread = OneThread(trl_class.name)

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        self._instance = await self._thread.run(self._class.make)
        columns = {name: value for name, value in row.items() if name not in OWN_COLUMNS}
        observation = await self._call("reset", **columns)
        if observation is None or isinstance(observation, str | list):
            return with_observation(row["raw_prompt"], cast("str | list[Message] | None", observation))
        raise EnvironmentBug(
            f"reset of {self._class.where} returned {describe_value(observation)}; return a str, content parts, or None"
        )

    def tools(self) -> Sequence[EnvironmentTool]:
        return self._class.tools

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResponse:
        try:
            result = await self._call(name, **arguments)
        except (ToolError, EnvironmentUnavailable):
            raise
        except Exception as error:
            raise ToolError(describe_error(error)) from error
        return _response(result)

    async def reward(self, messages: Sequence[Message]) -> RewardValue:
        return await self._call("get_reward") if self._class.has_reward else None

    async def close(self) -> None:
        try:
            if hasattr(self._instance, "close"):
                await self._call("close")
        finally:
            self._thread.shutdown()

    async def _call(self, method: str, **arguments: Any) -> Any:
        return await self._thread.call(getattr(self._instance, method), **arguments)


def with_observation(messages: Sequence[Message], observation: str | list[Message] | None) -> list[Message]:
    """Return the prompt with the observation, text or content parts, appended to its last message."""
    if observation is None or not messages:
        return list(messages)
    content: Any = messages[-1]["content"]
    if isinstance(observation, list) or isinstance(content, list):
        content = _as_parts(content) + _as_parts(observation)
    else:
        content += observation
    return [*messages[:-1], {**messages[-1], "content": content}]


def _as_parts(content: Any) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _response(result: Any) -> ToolResponse:
    """Convert the result of a method: content parts stay as they are, and anything else becomes a str."""
    if not isinstance(result, list):
        return ToolResponse(text=str(result))
    parts = cast(list[Any], result)
    if not all(isinstance(part, dict) and "type" in part for part in parts):
        return ToolResponse(text=str(parts))
    return ToolResponse(
        text="\n".join(part["text"] for part in parts if part["type"] == "text"),
        image=[part["image"] for part in parts if part["type"] == "image"] or None,
    )
