"""What an agent loop is: user code that decides what happens next and owns nothing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, field, structs

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, MultiTurnConfig
from agent_loop.episode import Episode
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.episode.turn_log import TurnLog
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.selection import read_interaction_name
from agent_loop.interactions.session import InteractionSession, InteractionSessionConfig
from agent_loop.loops.environments import EnvironmentFactory
from agent_loop.servers.completion_memory import CompletionMemory, RememberingServerManager
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.tools.base import BaseTool
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import AgentLoopOutput, Failure
from agent_loop.types import Message, StopReason


class LoopContext(Struct, frozen=True):
    """What a worker gives to each loop."""

    server_manager: AsyncLLMServerManager
    template: ChatTemplate
    limits: EpisodeLimits
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    tools: Mapping[str, BaseTool] = field(default_factory=dict[str, BaseTool])
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict[str, BaseInteraction])
    environments: Mapping[str, EnvironmentFactory] = field(default_factory=dict[str, EnvironmentFactory])
    settings: Config | None = None
    """All settings of the run, for loops that read them by other names; None if they are not known."""
    new_log: Callable[[], TurnLog] | None = None
    """Gives the record of the next episode; None where no journal is kept."""
    completions: CompletionMemory | None = None
    """Remembers what `loop.server_manager` returns, for loops on token ids; episodes keep their own record."""
    cancellation: asyncio.Event | None = None
    """Shared by trajectories that are cancelled together: once it is set, their episodes end with `cancelled`."""

    def of_trajectory(
        self,
        server_manager: AsyncLLMServerManager,
        *,
        new_log: Callable[[], TurnLog] | None,
        completions: CompletionMemory,
    ) -> LoopContext:
        """Return the context of one trajectory."""
        return structs.replace(self, server_manager=server_manager, new_log=new_log, completions=completions)


class AgentLoopBase(ABC):
    """One agent loop; made anew for each row.

    Subclass it, write `run`, and give it a name with `@register("name")`. Further keys of its entry in
    `agent_loop_config_path` arrive as keyword arguments of the constructor.
    """

    def __init__(self, context: LoopContext) -> None:
        self.context = context
        self.template = context.template
        self.tokenizer = context.template.tokenizer
        self.last_episode: Episode | None = None

    @cached_property
    def server_manager(self) -> AsyncLLMServerManager:
        """The servers, for loops that handle token ids themselves."""
        manager, completions = self.context.server_manager, self.context.completions
        return manager if completions is None else RememberingServerManager(manager, completions)

    @abstractmethod
    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs one conversation.

        Args:
            sampling_params: Temperature, top_p and top_k of the run; pass them on, changed or not.
            row: The row's columns, `raw_prompt` (the messages) among them.

        Returns:
            The trajectory: an episode's `output()`, or one built from token lists. Or several: branches, sub-agents,
            the parts of a compacted conversation; each is scored and trained as a member of the row's group.

        Raises:
            Exception: Whatever is raised fails this trajectory and no other.
        """

    def episode(
        self,
        messages: Sequence[Message],
        *,
        tools: Mapping[str, BaseTool] | None = None,
        tools_kwargs: Mapping[str, Any] | None = None,
        interaction_kwargs: Mapping[str, Any] | None = None,
    ) -> Episode:
        """A new episode on this loop's servers, for `async with`.

        Args:
            messages: The first prompt.
            tools: The tools that the model may call, by name; their schemas are shown to it.
            tools_kwargs: Per tool name: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`.
            interaction_kwargs: `name` of an interaction, and what it is started with. Without a name they are ignored
                if no interaction is configured.

        Raises:
            DataError: There is no such tool or interaction.
        """
        tools = tools or {}
        session = None
        if tools or tools_kwargs:
            config = ToolSessionConfig(
                timeout_s=self.context.multi_turn.tool_timeout_s,
                close_timeout_s=self.context.multi_turn.close_timeout_s,
            )
            session = ToolSession(tools, config=config, tools_kwargs=tools_kwargs)
        self.last_episode = Episode(
            messages,
            template=self.template,
            server_manager=self.context.server_manager,
            limits=self.context.limits,
            tools=session,
            tool_schemas=[tool.tool_schema for tool in tools.values()],
            interaction=self._interaction_session(interaction_kwargs),
            log=None if self.context.new_log is None else self.context.new_log(),
            cancellation=self.context.cancellation,
        )
        return self.last_episode

    def left_behind(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """What there is of a `run` that did not return: the record of its last episode, if it had one.

        Args:
            reason: Why it ended, where the episode does not say.
            failure: What made it fail.
        """
        if self.last_episode is None:
            return AgentLoopOutput(segments=(), stop_reason=reason, failure=failure)
        self.last_episode.stop(reason)
        return self.last_episode.output(failure=failure)

    async def apply_chat_template(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a first prompt without images, for loops that work on token ids."""
        return self.template.open(messages, tools=tools).tolist()

    def _interaction_session(self, interaction_kwargs: Mapping[str, Any] | None) -> InteractionSession | None:
        name = read_interaction_name(
            interaction_kwargs, known=self.context.interactions, where="interaction_kwargs"
        )
        if name is None:
            return None
        config = InteractionSessionConfig(
            timeout_s=self.context.multi_turn.interaction_timeout_s,
            close_timeout_s=self.context.multi_turn.close_timeout_s,
        )
        return InteractionSession(
            self.context.interactions[name], config=config, interaction_kwargs=interaction_kwargs
        )
