"""Base class of environments: the state, tools, replies and reward of one trajectory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from agent_loop.interactions.base import Reply
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import ArgumentChecking, ToolResponse
from agent_loop.types import Message

ResultT = TypeVar("ResultT")
MaybeAsync: TypeAlias = ResultT | Awaitable[ResultT]
"""Result of a method that may be written with `def` or with `async def`."""
RewardValue: TypeAlias = float | Mapping[str, Any] | None
"""A number, a mapping with `reward` whose other values are recorded as parts of the reward, or None for no reward."""


@dataclass(frozen=True, slots=True)
class EnvironmentTool:
    """A tool of an environment, as the model sees it."""

    schema: Mapping[str, Any]
    """OpenAI function schema: `{"type": "function", "function": {name, description, parameters}}`."""
    is_shown: bool = True
    """Whether the prompt lists the tool. A tool that is not shown can be called all the same."""
    check_arguments: ArgumentChecking = ArgumentChecking.STRICT
    """How the arguments of calls are checked against the schema."""

    @classmethod
    def of(
        cls, name: str, description: str, parameters: Mapping[str, Any], **settings: Any
    ) -> EnvironmentTool:
        """Return a tool from the parts of its schema. `settings` are the other fields."""
        function = {"name": name, "description": description, "parameters": parameters}
        return cls({"type": "function", "function": function}, **settings)

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


class Environment(ABC):
    """Environment of one trajectory. A new instance is created for every trajectory, and closed whatever happens.

    All methods may be written with `def` or `async def`. A method with `def` runs in a thread that belongs to this
    instance, so it may block. The methods of an instance never run at the same time.

    Every method may raise `EnvironmentUnavailable` if something that it depends on cannot be reached. The trajectory
    then fails without a reward and may be retried (`rollout.retries`). Any other exception, except `ToolError` in
    `call`, counts as a bug of the environment.
    """

    on_replay: OnReplay | str = OnReplay.RESTART
    """What to do with recorded calls and replies when a trajectory is resumed. `rerun` suits environments whose state
    depends on the row and the calls alone."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> MaybeAsync[str | list[Message] | None]:
        """Start the trajectory of a row.

        Args:
            row: The row's columns, including `raw_prompt`.

        Returns:
            Text, which is appended to the prompt's last message; messages, which replace the prompt; or None.
        """

    def tools(self) -> MaybeAsync[Sequence[EnvironmentTool]]:
        """Return the model's tools. Called once, after `reset`."""
        return ()

    def call(self, name: str, arguments: dict[str, Any]) -> MaybeAsync[ToolResponse | str]:
        """Execute a call of one of the tools.

        Raises:
            ToolError: The call failed. The model reads the message.
        """
        raise NotImplementedError(f"{type(self).__name__} has tools but no method call")

    def reply(self, messages: Sequence[Message]) -> MaybeAsync[Reply]:
        """Reply to a model turn that calls no tool. Without this method such a turn ends the trajectory.

        Args:
            messages: The conversation, whose last message is the model's turn.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method reply")

    def reward(self, messages: Sequence[Message]) -> MaybeAsync[RewardValue]:
        """Return the reward of the whole trajectory, also if a limit ended it. None leaves it to `reward.function`.

        Args:
            messages: The whole conversation.
        """
        return None

    def close(self) -> MaybeAsync[None]:
        """Free what the instance holds. Also called if `reset` failed or was cancelled."""
