"""Base class of tools, and the response of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

from msgspec import Struct

from agent_loop.errors import ConfigError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.schema import ArgumentsCheck


class ToolResponse(Struct, frozen=True):
    """Response of a tool, shown to the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    ends_episode: bool = False
    """Whether the trajectory ends with this response. The response is recorded; the model gets no further turn."""


class ArgumentChecking(StrEnum):
    """How the arguments of a call are checked against the tool's schema."""

    STRICT = "strict"
    """Report arguments that do not match to the model, and do not execute the call."""
    COERCE = "coerce"
    """Convert arguments of another type where the value stays the same, such as `"3"` to `3`, then check strictly."""
    OFF = "off"
    """Execute the call with any arguments."""


class BaseTool(ABC):
    """Base class of tools that models can call.

    All trajectories of a worker share one object. Keep the state of a trajectory under its `instance_id`. An
    `instance_id` belongs to one trajectory and is never reused; `trajectory_of` returns the part that the ids of
    all tools of one trajectory, and of its interaction, have in common.

    The methods are called per trajectory: `create` once before the first call, `execute` for each call, `calc_reward`
    once at the end, and `release` last, also after a failure.

    Args:
        config: The tool's own settings, as given in the YAML registry.
        tool_schema: The OpenAI function schema: `{"type": "function", "function": {name, description, parameters}}`.
            A subclass with a class attribute `tool_schema` needs none in the registry.
    """

    on_replay: OnReplay | str = OnReplay.RESTART
    """Whether a call may be executed twice.

    The value decides what happens to recorded calls when a trajectory is resumed after a crash or a cancellation. With
    the default, such a trajectory restarts at the tool's next call. The value also decides whether `retries` are
    allowed: only with `RECORDED` is a repeated call harmless."""
    timeout_s: float | None = None
    """Time limit of one call in seconds, with its retries and the `create` before the first call. None uses
    `multi_turn.tool_timeout_s`."""
    max_concurrent: int | None = None
    """Maximum number of concurrent calls of all trajectories of one process. Further calls are queued, and their time
    limits begin when they start. None sets no limit."""
    retries: int = 0
    """How often a call that raised `ToolUnavailable` is retried."""
    check_arguments: ArgumentChecking | str = ArgumentChecking.STRICT
    """How the arguments of calls are checked against the schema."""

    close_timeout_s: float | None = None
    """Time limit of `calc_reward`, and of `release`, in seconds. None uses `multi_turn.close_timeout_s`."""
    is_always_judged: bool = False
    """Whether `calc_reward` is also called for a trajectory that made no call. `create` is called before it."""
    is_shown: bool = True
    """Whether the prompt lists the tool. A tool that is not shown can be called all the same."""
    row_columns: Sequence[str] = ()
    """Columns of the row that `create` gets as keyword arguments, if the row has them."""

    schema_type: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = dict
    """Type in which the constructor gets the schema of a registry file."""

    _given_name: str | None = None

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.tool_schema = dict(tool_schema)

    @property
    def name(self) -> str:
        """Name by which the model calls the tool, as given in the schema."""
        return self._given_name or str(self.tool_schema["function"]["name"])

    @name.setter
    def name(self, name: str) -> None:
        """Accept a name that a constructor sets. Loading the tool fails if the name differs from the schema's."""
        self._given_name = name

    @cached_property
    def arguments_check(self) -> ArgumentsCheck:
        """Validator of the arguments of calls against the schema."""
        return ArgumentsCheck(self.tool_schema)

    @cached_property
    def has_state(self) -> bool:
        """Whether the tool overrides `create` or `release`, so that its instances must be created and released."""
        return _is_own(self.create, BaseTool.create) or _is_own(self.release, BaseTool.release)

    @cached_property
    def has_verdict(self) -> bool:
        """Whether the tool overrides `calc_reward`."""
        return _is_own(self.calc_reward, BaseTool.calc_reward)

    @property
    def is_read_later(self) -> bool:
        """Whether the tool's state is read after its last call, which `calc_reward` does."""
        return self.has_verdict

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Set up an instance for one trajectory. `kwargs` are the row's `tools_kwargs[name]["create_kwargs"]`."""

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Execute one call. The parameters match the schema. `kwargs` are the row's `execute_kwargs`.

        Returns:
            The response, the reward of this call (None for no reward), and a dict of values to record. The response may
            also be a str, or a dict, which the model reads as JSON. The last two may be omitted.

        Raises:
            ToolError: The call failed. The model reads the message.
            ToolUnavailable: The call failed this time, but the same call may succeed later.
        """

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the tool's reward for the whole trajectory, or None for no reward."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release what `create` set up."""


def check_declarations(tool: BaseTool) -> OnReplay:
    """Check `on_replay`, `check_arguments` and the limits of a tool, and return its `on_replay`."""
    on_replay = OnReplay(tool.on_replay)
    for key, is_valid, allowed in (
        ("check_arguments", tool.check_arguments in tuple(ArgumentChecking), " or ".join(ArgumentChecking)),
        ("timeout_s", tool.timeout_s is None or tool.timeout_s > 0, "seconds, or None"),
        ("close_timeout_s", tool.close_timeout_s is None or tool.close_timeout_s > 0, "seconds, or None"),
        ("max_concurrent", tool.max_concurrent is None or tool.max_concurrent >= 1, "at least 1, or None"),
        ("retries", tool.retries >= 0, "0 or more"),
    ):
        if not is_valid:
            raise ConfigError(f"{key} of tool {tool.name!r} is {getattr(tool, key)!r}; give {allowed}")
    if tool.retries and on_replay is not OnReplay.RECORDED:
        raise ConfigError(
            f"tool {tool.name!r} has retries={tool.retries} but on_replay={str(on_replay)!r}: a call that failed may "
            "have had its effect; set retries to 0, or set on_replay to 'recorded' if repeating a call is harmless"
        )
    return on_replay


def _is_own(method: Callable[..., Any], default: Callable[..., Any]) -> bool:
    return getattr(method, "__func__", None) is not default


def trajectory_of(instance_id: str) -> str:
    """Return the part that the instance ids of one trajectory's tools and of its interaction have in common."""
    return instance_id.partition("-")[0]
