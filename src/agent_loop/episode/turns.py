"""What an episode tells of itself: a turn, a place between turns, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from agent_loop.errors import AgentLoopError
from agent_loop.types import MalformedCall, ParsedCompletion, StopReason, TokenOutput, ToolCall


class EpisodeStopped(AgentLoopError):
    """Raised by an episode that is over, to leave the loop's body; the trajectory's record is complete."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode is over: {reason}")
        self.reason = reason


class Completion(Struct, frozen=True):
    """One assistant turn, as it was sampled and as it reads."""

    sampled: TokenOutput
    parsed: ParsedCompletion
    is_cut: bool
    """It ended by a limit, not by the model's own stop token."""

    @property
    def token_ids(self) -> Sequence[int]:
        return self.sampled.token_ids

    @property
    def content(self) -> str:
        return self.parsed.content

    @property
    def calls(self) -> tuple[ToolCall | MalformedCall, ...]:
        return self.parsed.calls


class EpisodeMark(Struct, frozen=True):
    """A place in an episode, between its verbs, from which it may branch later."""

    num_tokens: int
    num_messages: int
    assistant_turns: int
    user_turns: int
    last_calls: Sequence[ToolCall]
    num_feedback: int
    log_position: Any
    """As the episode's record counts."""
