"""Environments as TRL's `environment_factory` takes them: a class whose public methods are the model's tools.

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

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.errors import ConfigError, EnvironmentBug, ToolError
from agent_loop.loading import load_object
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.numeric import REWARD_LIMIT, as_reward
from agent_loop.runtime.threads import OneThread
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.signature import function_schema
from agent_loop.types import Message

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
OWN_COLUMNS = frozenset({"raw_prompt", "agent_name", "environment", "tools_kwargs", "interaction_kwargs"})
"""What rows say to the loop; `reset` gets every other column."""


class EnvironmentFactory:
    """Makes the environments of trajectories.

    Args:
        make: A class without required arguments, or a function that returns an instance. One is made at once, to see
            what it offers.
        where: Names it in errors.

    Raises:
        ConfigError: Making one raised, it has no `reset`, or it has a public method that no model could be told how to
            call.
    """

    def __init__(self, make: Callable[[], Any], *, where: str) -> None:
        self.where = where
        self._make = make
        try:
            probe: Any = make()
        except Exception as error:
            raise ConfigError(f"{where}: making one raised {describe_error(error)}") from error
        functions = dict(inspect.getmembers(cast(Any, type(probe)), predicate=inspect.isfunction))
        if "reset" not in functions:
            raise ConfigError(f"{where}: {type(probe).__name__} has no method reset; write one")
        self.name = type(probe).__name__
        self.has_reward = "get_reward" in functions
        self.schemas: Mapping[str, dict[str, Any]] = {
            name: function_schema(getattr(probe, name), name=name)
            for name in functions
            if name not in NOT_TOOLS and not name.startswith("_")
        }
        self.on_replay = OnReplay(getattr(probe, "on_replay", OnReplay.RESTART))

    def new(self) -> Environment:
        """The environment of one trajectory, which is made when it is reset."""
        return Environment(self, self._make)


class Environment:
    """One trajectory's instance. Its calls run one after the other; what is not async in a thread of its own.

    Args:
        factory: What is known of its class.
        make: Makes the instance.
    """

    def __init__(self, factory: EnvironmentFactory, make: Callable[[], Any]) -> None:
        self.where = factory.where
        self._factory = factory
        self._make = make
        self._instance: Any = None
        self._thread = OneThread(factory.name)
        self._turn = asyncio.Lock()

    @property
    def tools(self) -> dict[str, BaseTool]:
        """Its methods, by name."""
        return {
            name: EnvironmentTool(self, schema, on_replay=self._factory.on_replay)
            for name, schema in self._factory.schemas.items()
        }

    async def reset(self, row: Mapping[str, Any]) -> str | list[Message] | None:
        """Makes the instance and returns its first observation.

        Raises:
            EnvironmentBug: It is no text, no list of content parts, and not None.
            Exception: Whatever the environment raises.
        """
        self._instance = await self._thread.run(self._make)
        columns = {name: value for name, value in row.items() if name not in OWN_COLUMNS}
        observation = await self.call("reset", **columns)
        if observation is None or isinstance(observation, str | list):
            return cast("str | list[Message] | None", observation)
        raise EnvironmentBug(
            f"reset of {self.where} returned {describe_value(observation)}; return a str, content parts, or None"
        )

    async def call(self, method: str, **arguments: Any) -> Any:
        """What a method returns."""
        bound = getattr(self._instance, method)
        async with self._turn:
            if inspect.iscoroutinefunction(bound):
                return await bound(**arguments)
            return await self._thread.run(bound, **arguments)

    async def reward(self) -> float | None:
        """The environment's own reward; None if it has none.

        Raises:
            EnvironmentBug: It is neither None nor a number that can be a reward.
            Exception: Whatever the environment raises.
        """
        returned = await self.call("get_reward") if self._factory.has_reward else None
        reward = None if returned is None else as_reward(returned)
        if reward is None and returned is not None:
            raise EnvironmentBug(
                f"get_reward of {self.where} returned {describe_value(returned)}; return a finite number {REWARD_LIMIT}"
            )
        return reward

    async def close(self) -> None:
        """Ends the thread; calls the instance's own `close` before, if it has one."""
        try:
            if hasattr(self._instance, "close"):
                await self.call("close")
        finally:
            self._thread.shutdown()


class EnvironmentTool(BaseTool):
    """A method of one trajectory's environment. Whatever it raises is told to the model."""

    def __init__(
        self, environment: Environment, tool_schema: Mapping[str, Any], *, on_replay: OnReplay
    ) -> None:
        super().__init__({}, tool_schema)
        self.on_replay = on_replay
        self._environment = environment

    @property
    def is_read_later(self) -> bool:
        """The environment's own reward is read at the end."""
        return True

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        try:
            result = await self._environment.call(self.name, **parameters)
        except Exception as error:
            raise ToolError(describe_error(error)) from error
        return _response(result), None, {}


def load_environments(references: Mapping[str, str]) -> dict[str, EnvironmentFactory]:
    """The environments by the names that rows choose them by.

    Args:
        references: `file.py:Class` or `module:Class`, or functions that return instances.

    Raises:
        ConfigError: One does not exist, or cannot be used.
    """
    environments: dict[str, EnvironmentFactory] = {}
    for name, reference in references.items():
        where = f"rollout.multi_turn.environments.{name} ({reference})"
        make = load_object(reference, key=where)
        if not callable(make):
            raise ConfigError(f"{where} is {describe_value(make)}; name a class")
        environments[name] = EnvironmentFactory(make, where=where)
    return environments


def with_observation(messages: Sequence[Message], observation: str | list[Message] | None) -> list[Message]:
    """The prompt, its last message followed by the observation, without anything in between."""
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
    """Content parts as they are, anything else as `str` gives it."""
    if not isinstance(result, list):
        return ToolResponse(text=str(result))
    parts = cast(list[Any], result)
    if not all(isinstance(part, dict) and "type" in part for part in parts):
        return ToolResponse(text=str(parts))
    return ToolResponse(
        text="\n".join(part["text"] for part in parts if part["type"] == "text"),
        image=[part["image"] for part in parts if part["type"] == "image"] or None,
    )
