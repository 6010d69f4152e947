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
"""Columns that the loop reads. `reset` gets all other columns."""


class EnvironmentFactory:
    """Creates the environments of trajectories.

    Args:
        make: A class without required arguments, or a function that returns an instance. It is called at once, to
            inspect the methods of an instance.
        where: Name of the environment in errors.

    Raises:
        ConfigError: Creating an instance raised, the instance has no `reset`, or the parameters of a public method
            cannot be described to a model.
    """

    def __init__(self, make: Callable[[], Any], *, where: str) -> None:
        self.where = where
        self._make = make
        try:
            probe: Any = make()
        except Exception as error:
            raise ConfigError(
                f"{where}: creating an instance raised {describe_error(error)}; fix it"
            ) from error
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
        """Return the environment of one trajectory. `reset` creates its instance."""
        return Environment(self, self._make)


class Environment:
    """Environment of one trajectory.

    Its calls run one after the other. Methods that are not async run in a thread that the environment owns.

    Args:
        factory: Facts about the environment's class.
        make: Creates the instance.
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
        """The environment's methods as tools, by name."""
        return {
            name: EnvironmentTool(self, schema, on_replay=self._factory.on_replay)
            for name, schema in self._factory.schemas.items()
        }

    async def reset(self, row: Mapping[str, Any]) -> str | list[Message] | None:
        """Create the instance and return its first observation.

        Raises:
            EnvironmentBug: The observation is not text, a list of content parts, or None.
            Exception: Any exception of the environment.
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
        """Call a method and return its result."""
        bound = getattr(self._instance, method)
        async with self._turn:
            if inspect.iscoroutinefunction(bound):
                return await bound(**arguments)
            return await self._thread.run(bound, **arguments)

    async def reward(self) -> float | None:
        """Return the environment's reward, or None if it has no reward.

        Raises:
            EnvironmentBug: The reward is neither None nor a finite number.
            Exception: Any exception of the environment.
        """
        returned = await self.call("get_reward") if self._factory.has_reward else None
        reward = None if returned is None else as_reward(returned)
        if reward is None and returned is not None:
            raise EnvironmentBug(
                f"get_reward of {self.where} returned {describe_value(returned)}; return a finite number {REWARD_LIMIT}"
            )
        return reward

    async def close(self) -> None:
        """Call the instance's `close`, if it has one, and end the thread."""
        try:
            if hasattr(self._instance, "close"):
                await self.call("close")
        finally:
            self._thread.shutdown()


class EnvironmentTool(BaseTool):
    """A method of one trajectory's environment. Its exceptions are reported to the model."""

    def __init__(
        self, environment: Environment, tool_schema: Mapping[str, Any], *, on_replay: OnReplay
    ) -> None:
        super().__init__({}, tool_schema)
        self.on_replay = on_replay
        self._environment = environment

    @property
    def is_read_later(self) -> bool:
        """True: the environment's reward is read at the end."""
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
    """Load environments, by the names that rows use for them.

    Args:
        references: `file.py:Class` or `module:Class`, or functions that return instances, by name.

    Raises:
        ConfigError: An environment does not exist or cannot be used.
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
    """Return the prompt with the observation appended to its last message."""
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
