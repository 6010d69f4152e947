"""Base class of agent loops, and the context that a worker gives to them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self
from uuid import uuid4

from msgspec import Struct, field

from agent_loop.chat.messages import shown_tool
from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, MultiTurnConfig
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.live import LiveEnvironment
from agent_loop.episode import Episode
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.registry import read_interaction_name
from agent_loop.recording.row_log import EpisodeLog, RowLog
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.tools.base import BaseTool
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import AgentLoopOutput, Failure
from agent_loop.types import Message, StopReason


class LoopContext(Struct, frozen=True):
    """Servers, template, limits, tools and interactions that a loop works with."""

    server_manager: AsyncLLMServerManager
    template: ChatTemplate
    limits: EpisodeLimits
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    tools: Mapping[str, BaseTool] = field(default_factory=dict[str, BaseTool])
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict[str, BaseInteraction])
    environments: Mapping[str, EnvironmentFactory] = field(default_factory=dict[str, EnvironmentFactory])
    settings: Config | None = None
    """All settings of the run, for loops that read them by other names. None if they are unknown."""
    log: RowLog | None = None
    """Log of the trajectory. None records nothing."""
    cancellation: asyncio.Event | None = None
    """Shared by trajectories that are cancelled together. Once it is set, their episodes end with `cancelled`."""

    def new_log(self) -> EpisodeLog | None:
        """Return the log of the trajectory's next episode. None records nothing."""
        return None if self.log is None else self.log.new_episode()


class AgentLoopBase(ABC):
    """Base class of agent loops. A new instance is created for every trajectory.

    Subclass it, write `run`, and give it a name with `@register("name")`. Further keys of its entry in
    `agent_loop_config_path` are passed to the constructor as keyword arguments.
    """

    def __init__(self, context: LoopContext) -> None:
        self.context = context
        self.template = context.template
        self.tokenizer = context.template.tokenizer
        self.last_episode: Episode | None = None

    @classmethod
    def from_context(cls, context: LoopContext, **kwargs: Any) -> Self:
        """Create the loop of one trajectory."""
        return cls(context, **kwargs)

    @classmethod
    def check_row(cls, row: Mapping[str, Any], arguments: Mapping[str, Any], *, where: str) -> None:
        """Check whether a row can run with this loop. Called for all rows before the first one runs.

        Args:
            row: The row.
            arguments: Keyword arguments of the constructor, from the loop's entry in `agent_loop_config_path`.
            where: Name of the row in errors.

        Raises:
            DataError: The row is invalid.
            ConfigError: The loop needs something that is not installed.
        """

    @cached_property
    def server_manager(self) -> AsyncLLMServerManager:
        """The servers, for loops that handle token ids themselves."""
        return self.context.server_manager

    @abstractmethod
    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one conversation.

        Args:
            sampling_params: Temperature, top_p and top_k of the run, to be passed to `generate`, changed or unchanged.
            row: The row's columns, including `raw_prompt` (the messages).

        Returns:
            The trajectory: an episode's `output()`, or an output built from token lists. A list holds several, for
            branches, sub-agents, or the parts of a compacted conversation. Each is scored and trained as a member of
            the row's group.

        Raises:
            Exception: Any exception fails this trajectory and no other.
        """

    def episode(
        self,
        messages: Sequence[Message],
        *,
        tools: Mapping[str, BaseTool] | None = None,
        tools_kwargs: Mapping[str, Any] | None = None,
        interaction_kwargs: Mapping[str, Any] | None = None,
    ) -> Episode:
        """Return a new episode on this loop's servers, to be used with `async with`.

        Args:
            messages: The first prompt.
            tools: The tools that the model may call, by name. The prompt contains their schemas.
            tools_kwargs: By tool name: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`.
            interaction_kwargs: `name` of an interaction, and its arguments. Without a name they are ignored if no
                interaction is configured.

        Raises:
            DataError: The tool or interaction does not exist.
        """
        tools, trajectory = tools or {}, uuid4().hex
        session = None
        if tools or tools_kwargs:
            config = ToolSessionConfig(
                timeout_s=self.context.multi_turn.tool_timeout_s,
                close_timeout_s=self.context.multi_turn.close_timeout_s,
            )
            session = ToolSession(tools, config=config, tools_kwargs=tools_kwargs, trajectory=trajectory)
        self.last_episode = Episode(
            messages,
            template=self.template,
            server_manager=self.context.server_manager,
            limits=self.context.limits,
            tools=session,
            tool_schemas=[shown_tool(tool.tool_schema) for tool in tools.values() if tool.is_shown],
            interaction=self._interaction(interaction_kwargs, trajectory=trajectory),
            log=self.context.new_log(),
            cancellation=self.context.cancellation,
        )
        return self.last_episode

    def unfinished_output(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the output of a `run` that did not return: the record of its last episode, if it had one."""
        if self.last_episode is None:
            return AgentLoopOutput(segments=(), stop_reason=reason, failure=failure)
        self.last_episode.stop(reason)
        return self.last_episode.output(failure=failure)

    async def apply_chat_template(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of a first prompt without images, for loops that work on token ids."""
        return self.template.open(messages, tools=tools).tolist()

    def _interaction(
        self, interaction_kwargs: Mapping[str, Any] | None, *, trajectory: str
    ) -> LiveEnvironment | None:
        """Return what replies to turns of an episode that call no tool."""
        name = read_interaction_name(
            interaction_kwargs, known=self.context.interactions, where="interaction_kwargs"
        )
        if name is None:
            return None
        return LiveEnvironment.of_interaction(
            self.context.interactions[name],
            row={"interaction_kwargs": interaction_kwargs, "trajectory": trajectory},
            limits=self.context.multi_turn,
        )
