"""Limits that end an episode, as pure functions of counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_loop.types import SamplingParams, StopReason


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. None means no limit."""

    prompt_length: int
    """Maximum number of tokens of the first prompt."""
    response_length: int
    """Maximum number of tokens after the first prompt."""
    truncate_prompt: str = "no"
    """`left` or `right`: cut the beginning or the end of a longer prompt. `no` ends the episode instead."""
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_turn_tokens: int | None = None
    """Maximum number of tokens of one assistant turn."""
    deadline_s: float | None = None
    """Seconds from entering the episode to its end."""
    turn_timeout_s: float | None = None
    """Seconds from the start of a completion until the reply to the completion is added."""
    generate_timeout_s: float | None = None
    """Seconds of one completion, including its time in the queue and retries on other servers."""

    def with_deadline(self, deadline_s: float | None) -> EpisodeLimits:
        """Return these limits with a deadline of a row, if it is earlier."""
        if deadline_s is None or (self.deadline_s is not None and self.deadline_s <= deadline_s):
            return self
        return replace(self, deadline_s=deadline_s)

    def forbids_turn(self, *, assistant_turns: int, num_tokens: int) -> StopReason | None:
        """Return the limit that forbids another assistant turn; None if another turn is allowed."""
        if self.max_assistant_turns is not None and assistant_turns >= self.max_assistant_turns:
            return StopReason.MAX_ASSISTANT_TURNS
        return StopReason.RESPONSE_LENGTH if num_tokens >= self.response_length else None

    def forbids_reply(self, *, assistant_turns: int, user_turns: int, num_tokens: int) -> StopReason | None:
        """Return the limit that forbids a reply followed by another assistant turn; None if both are allowed."""
        forbidden = self.forbids_turn(assistant_turns=assistant_turns, num_tokens=num_tokens)
        if forbidden is StopReason.MAX_ASSISTANT_TURNS:
            return forbidden
        if self.max_user_turns is not None and user_turns >= self.max_user_turns:
            return StopReason.MAX_USER_TURNS
        return forbidden

    def is_last_turn(self, *, assistant_turns: int, user_turns: int) -> bool:
        """Return whether a turn limit forbids a reply after the next assistant turn."""
        if self.max_assistant_turns is not None and assistant_turns + 1 >= self.max_assistant_turns:
            return True
        return self.max_user_turns is not None and user_turns >= self.max_user_turns

    def applied(
        self, params: SamplingParams, *, num_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> SamplingParams:
        """Return the sampling parameters with `max_tokens` lowered to the limits and with more stop tokens."""
        left = self.response_length - num_tokens
        if self.max_turn_tokens is not None:
            left = min(left, self.max_turn_tokens)
        if params.max_tokens is not None:
            left = min(left, params.max_tokens)
        return params.limited(left, more_stop_token_ids=tuple(stop_token_ids))
