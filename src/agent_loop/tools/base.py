"""What a tool is: four methods around one instance per trajectory, and what it declares of its calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct

from agent_loop.errors import ConfigError
from agent_loop.runtime.boundary import OnReplay
from agent_loop.tools.schema import ArgumentsCheck


class ToolResponse(Struct, frozen=True):
    """What a tool answers the model with."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    ends_episode: bool = False
    """The trajectory is over; this answer is recorded but the model gets no further turn."""


class BaseTool(ABC):
    """One tool that models may call. The object is shared by all trajectories of a worker; what belongs to one
    trajectory is kept under its `instance_id`.

    An `instance_id` is used for one trajectory and never again; `trajectory_of` tells those of its other tools.

    Per trajectory: `create` once before the first call, `execute` for each call, `calc_reward` once at the end,
    `release` last, whatever happened before.

    Args:
        config: The tool's own settings, as given in the YAML registry.
        tool_schema: The OpenAI function schema: `{"type": "function", "function": {name, description, parameters}}`.
            A subclass that carries its own as a class attribute `tool_schema` needs none in the registry.
    """

    on_replay: OnReplay | str = OnReplay.RESTART
    """Whether a call may be run twice. It decides what becomes of recorded calls when a trajectory is run again after a
    crash or a cancellation (say it of your tool, or such trajectories begin anew at its next call), and whether
    `retries` are allowed: only `RECORDED` tells that running a call again does no harm."""
    timeout_s: float | None = None
    """One call with its retries, the `create` before the first included; None is `multi_turn.tool_timeout_s`."""
    max_concurrent: int | None = None
    """Calls that run at once, of all trajectories that share this object: those of one process. The others queue, and
    their time limits begin when they start. None is no limit."""
    retries: int = 0
    """How often a call that raised `ToolUnavailable` is run again."""

    _given_name: str | None = None

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.tool_schema = dict(tool_schema)

    @property
    def name(self) -> str:
        """The name that the model calls the tool by, which is the schema's."""
        return self._given_name or str(self.tool_schema["function"]["name"])

    @name.setter
    def name(self, name: str) -> None:
        """Accept the name from a constructor that sets it. Loading refuses one that is not the schema's."""
        self._given_name = name

    @cached_property
    def arguments_check(self) -> ArgumentsCheck:
        """Holds the arguments of calls against the schema."""
        return ArgumentsCheck(self.tool_schema)

    @cached_property
    def has_state(self) -> bool:
        """Whether it has instances to create and release: it defines either."""
        return _is_own(self.create, BaseTool.create) or _is_own(self.release, BaseTool.release)

    @cached_property
    def has_verdict(self) -> bool:
        """Whether it defines `calc_reward`."""
        return _is_own(self.calc_reward, BaseTool.calc_reward)

    @property
    def is_read_later(self) -> bool:
        """Whether the state that calls leave is read after the last of them: for the verdict."""
        return self.has_verdict

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Sets up what one trajectory needs. `kwargs` are the row's `tools_kwargs[name]["create_kwargs"]`."""

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Runs one call. The parameters fit the schema. `kwargs` are the row's `execute_kwargs`.

        Returns:
            The answer, a reward for this call (None for no reward), and anything worth recording. The answer may also
            be a str, or a dict, which the model reads as JSON; and it may be returned alone.

        Raises:
            ToolError: The call did not work; the message is the model's answer.
            ToolUnavailable: It did not work this time, but the same call may later.
        """

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The tool's verdict on the whole trajectory; None if it has none."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Frees what `create` set up."""


def check_declarations(tool: BaseTool) -> OnReplay:
    """What a tool says in `on_replay`, once all that it declares of its calls was found to be in order.

    Raises:
        ConfigError: A limit is out of range, or calls that may not be run twice are to be retried.
    """
    on_replay = OnReplay(tool.on_replay)
    if tool.timeout_s is not None and not tool.timeout_s > 0:
        raise ConfigError(f"timeout_s of tool {tool.name!r} is {tool.timeout_s}; give seconds, or None")
    if tool.max_concurrent is not None and tool.max_concurrent < 1:
        raise ConfigError(
            f"max_concurrent of tool {tool.name!r} is {tool.max_concurrent}; give at least 1, or None"
        )
    if tool.retries < 0:
        raise ConfigError(f"retries of tool {tool.name!r} is {tool.retries}; give 0 or more")
    if tool.retries and on_replay is not OnReplay.RECORDED:
        raise ConfigError(
            f"tool {tool.name!r} has retries={tool.retries} but on_replay={str(on_replay)!r}: a call that seems to "
            "have failed may have had its effect; set retries to 0, or on_replay to 'recorded' if a second run does no "
            "harm"
        )
    return on_replay


def _is_own(method: Callable[..., Any], default: Callable[..., Any]) -> bool:
    return getattr(method, "__func__", None) is not default


def trajectory_of(instance_id: str) -> str:
    """What the instance ids of all tools of one trajectory have in common."""
    return instance_id.partition("-")[0]
