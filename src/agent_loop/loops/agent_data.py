"""State of one trajectory of the tool loop, for its handlers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, cast

from agent_loop.episode import Completion, Episode
from agent_loop.errors import EpisodeError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.tools.base import BaseTool
from agent_loop.trajectory import AgentLoopOutput, rewards_of
from agent_loop.types import AgentState, Message, Origin, ToolCall


class AgentData:
    """State that the handlers of `ToolAgentLoop` read: the conversation, its tokens, its counters and its rewards.

    Only the episode changes this state; every list is a copy. Until the prompt is rendered, `messages` is the prompt
    itself, and a handler may change it. `extra_fields` belongs to the loop and becomes part of the output's
    `extra_fields`.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        tools: Mapping[str, BaseTool],
        tools_kwargs: Mapping[str, Any] | None = None,
        interaction: BaseInteraction | None = None,
        interaction_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tools = tools
        self.tools_kwargs = tools_kwargs
        self.interaction = interaction
        self.interaction_kwargs = interaction_kwargs
        self.state = AgentState.PENDING
        self.completion: Completion | None = None
        """The last assistant turn."""
        self.extra_fields: dict[str, Any] = {}
        self._prompt: list[Message] = list(messages)
        self._episode: Episode | None = None

    async def open(self, episode: Episode) -> None:
        """Open the trajectory's episode, which renders the prompt."""
        if self._episode is not None:
            raise EpisodeError("the prompt is already rendered; PENDING comes once, so return another state")
        self._episode = await episode.__aenter__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._episode is not None:
            await self._episode.__aexit__(kind, error, traceback)

    @property
    def episode(self) -> Episode:
        """The episode, whose methods change the trajectory."""
        if self._episode is None:
            raise EpisodeError("the episode is not open before _handle_pending_state has run; call it first")
        return self._episode

    @property
    def request_id(self) -> str:
        """Id of the trajectory's session on the servers."""
        return self.episode.request_id

    @property
    def messages(self) -> list[Message]:
        """Messages of the conversation up to now."""
        return self._prompt if self._episode is None else list(self._episode.messages)

    @property
    def image_data(self) -> list[Any]:
        """The images in the conversation, in order."""
        return self._media("image")

    @property
    def video_data(self) -> list[Any]:
        """The videos in the conversation, in order."""
        return self._media("video")

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the first prompt."""
        return self._so_far().prompt_ids.tolist()

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the first prompt: the model's, the tools' and the interaction's."""
        return self._so_far().response_ids.tolist()

    @property
    def response_mask(self) -> list[int]:
        """For each token of `response_ids`: 1 if the model sampled it, else 0."""
        return self._so_far().response_mask.tolist()

    @property
    def response_logprobs(self) -> list[float] | None:
        """Log-prob of each token of `response_ids`, 0 where the mask is 0. None if a server returned none."""
        logprobs = self._so_far().response_logprobs
        return None if logprobs is None else logprobs.tolist()

    @property
    def assistant_turns(self) -> int:
        return 0 if self._episode is None else self._episode.assistant_turns

    @property
    def user_turns(self) -> int:
        """Number of turns of tools and of the interaction."""
        return 0 if self._episode is None else self._episode.user_turns

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Well-formed calls of the last assistant turn."""
        return [] if self.completion is None else self.completion.parsed.tool_calls

    @property
    def tool_rewards(self) -> list[float]:
        """Rewards that `BaseTool.execute` returned, in the order of the calls."""
        return [] if self._episode is None else list(rewards_of(self._episode.feedback, Origin.TOOL))

    @property
    def turn_scores(self) -> list[float]:
        """Scores that the interaction returned, one per turn."""
        return [] if self._episode is None else list(rewards_of(self._episode.feedback, Origin.INTERACTION))

    def _so_far(self) -> AgentLoopOutput:
        return AgentLoopOutput(segments=() if self._episode is None else self._episode.segments)

    def _media(self, kind: str) -> list[Any]:
        contents: list[Any] = [message.get("content") for message in self.messages]
        parts = [
            part for content in contents if isinstance(content, list) for part in cast(list[Any], content)
        ]
        return [part[kind] for part in parts if isinstance(part, dict) and kind in part]


current_agent_data: ContextVar[AgentData | None] = ContextVar("current_agent_data", default=None)
"""State of the trajectory whose tool loop is running, for tools that read it. None in other loops."""
