"""What ends an episode. Pure: counts in, verdicts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.types import SamplingParams, StopReason


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of an episode. None is no limit."""

    prompt_length: int
    """Tokens of the first prompt."""
    response_length: int
    """Tokens after the first prompt."""
    truncate_prompt: str = "no"
    """`left` or `right`: cut the beginning or the end of a longer prompt, instead of ending the episode."""
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_turn_tokens: int | None = None
    """Tokens of one assistant turn."""
    deadline_s: float | None = None
    """Seconds from opening."""
    turn_timeout_s: float | None = None
    """Seconds from the beginning of a completion until the reply to it is there."""
    generate_timeout_s: float | None = None
    """Seconds of one completion, its time in line and at other servers included."""

    def forbids_turn(self, *, assistant_turns: int, num_tokens: int) -> StopReason | None:
        """Why there can be no further assistant turn after so many turns and response tokens; None if there can."""
        if self.max_assistant_turns is not None and assistant_turns >= self.max_assistant_turns:
            return StopReason.MAX_ASSISTANT_TURNS
        return StopReason.RESPONSE_LENGTH if num_tokens >= self.response_length else None

    def forbids_reply(self, *, assistant_turns: int, user_turns: int, num_tokens: int) -> StopReason | None:
        """Why there can be no reply with a further assistant turn behind it; None if there can."""
        forbidden = self.forbids_turn(assistant_turns=assistant_turns, num_tokens=num_tokens)
        if forbidden is StopReason.MAX_ASSISTANT_TURNS:
            return forbidden
        if self.max_user_turns is not None and user_turns >= self.max_user_turns:
            return StopReason.MAX_USER_TURNS
        return forbidden

    def is_last_turn(self, *, assistant_turns: int, user_turns: int) -> bool:
        """Whether a turn limit stands behind the next assistant turn, so that nothing it asks for could be answered."""
        if self.max_assistant_turns is not None and assistant_turns + 1 >= self.max_assistant_turns:
            return True
        return self.max_user_turns is not None and user_turns >= self.max_user_turns

    def applied(
        self, params: SamplingParams, *, num_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> SamplingParams:
        """The parameters of a turn after so many response tokens: `max_tokens` lowered, stop tokens added."""
        left = self.response_length - num_tokens
        if self.max_turn_tokens is not None:
            left = min(left, self.max_turn_tokens)
        if params.max_tokens is not None:
            left = min(left, params.max_tokens)
        return params.limited(left, more_stop_token_ids=tuple(stop_token_ids))
