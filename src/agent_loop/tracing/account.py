"""What is told of a finished trajectory, before it is told as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.tracing.events import TraceAttributes
from agent_loop.trajectory import Feedback, Incident, Span
from agent_loop.types import Message, Origin, StopReason, TokenIds


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that follow each other and have one origin."""

    origin: Origin
    num_tokens: int
    weight_version: int | None
    """Of the last token."""
    token_ids: TokenIds | None
    text: str | None
    """In the place of the ids, where `token2text` asks for it."""


@dataclass(frozen=True, slots=True)
class Account:
    """One trajectory."""

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
    runs: Sequence[Run]
    """The prompt first, then what was said, in order."""
    messages: Sequence[Message]
    """From the first completion on, without what the model said beside its calls; none without `token2text`."""
    feedback: Sequence[Feedback]
    """Without what else tools returned."""
    incidents: Sequence[Incident]
    spans: Sequence[Span]
    """In the order in which they ended; a branch has those that may be its own."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs if run.origin is Origin.PROMPT)
