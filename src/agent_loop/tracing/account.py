"""Account of a finished trajectory: everything that its trace events are derived from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.tracing.events import TraceAttributes
from agent_loop.trajectory import Feedback, Incident, Span
from agent_loop.types import Message, Origin, StopReason, TokenIds


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of one origin."""

    origin: Origin
    num_tokens: int
    weight_version: int | None
    """Weight version of the last token."""
    token_ids: TokenIds | None
    text: str | None
    """Decoded text, which replaces the ids with `token2text`."""


@dataclass(frozen=True, slots=True)
class Account:
    """Trace of one trajectory: its events and attributes."""

    attributes: TraceAttributes
    began_at: float
    """Seconds since 1970."""
    seconds: float
    stop_reason: StopReason
    failure: str | None
    reward: float | None
    reward_extra: Mapping[str, Any]
    num_turns: int
    is_branch: bool
    runs: Sequence[TokenRun]
    """The prompt first, then completions and replies, oldest first."""
    messages: Sequence[Message]
    """Messages from the first completion on, without the model's text beside its calls; empty without `token2text`."""
    feedback: Sequence[Feedback]
    """Feedback of tools and interactions, without `extra`."""
    incidents: Sequence[Incident]
    spans: Sequence[Span]
    """Spans in the order in which they ended. A branch has only the spans that may be its own."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs if run.origin is Origin.PROMPT)
