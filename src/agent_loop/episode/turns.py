"""Types that an episode returns or raises: completions, marks, and the error that ends a loop."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from agent_loop.errors import AgentLoopError
from agent_loop.types import MalformedCall, Message, ParsedCompletion, StopReason, TokenOutput, ToolCall


class EpisodeStopped(AgentLoopError):
    """Raised by the methods of an episode that is over, so that the loop ends. The trajectory's record is complete."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode is over: {reason}")
        self.reason = reason


class Completion(Struct, frozen=True):
    """One assistant turn: its sampled tokens, and their text and tool calls."""

    sampled: TokenOutput
    parsed: ParsedCompletion
    """The whole turn, parsed: with its prefix, and with the tokens that this completion continues."""
    is_cut: bool
    """Whether a limit or an abort ended the turn, not a stop token."""

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
    """Position in an episode from which `Episode.branch` can start."""

    num_tokens: int
    num_messages: int
    assistant_turns: int
    user_turns: int
    last_calls: Sequence[ToolCall]
    turn_start: int
    """Number of tokens before the last assistant turn."""
    last_message: Message | None
    """Last message at this position."""
    num_feedback: int
    log_position: int
    """Position in the episode's log."""
