"""Events of a finished trajectory. Each event holds only what is new in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from agent_loop.trajectory import IncidentKind
from agent_loop.types import Origin, StopReason, TokenIds

ROOT_NAME = "agent_loop"


@dataclass(frozen=True, slots=True)
class TraceAttributes:
    """Attributes by which a trajectory is found in a tracing system."""

    trajectory_id: str
    step: int | None
    """Training step; None outside training."""
    sample_index: int
    """The row's `index`, or its position among the rows."""
    rollout_n: int
    """Number of the sample within its row."""
    validate: bool
    agent_name: str
    experiment_name: str
    name: str = ROOT_NAME

    def named(self) -> dict[str, Any]:
        """Return all attributes but the name of the trace, by name."""
        values = asdict(self)
        del values["name"]
        return values


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens that were added to the context: ids, or their text with `token2text`."""

    place: int
    """Index of the first token in prompt and response together."""
    count: int
    ids: TokenIds | None
    text: str | None


@dataclass(frozen=True, slots=True)
class EventTime:
    """Start and end in seconds since the trajectory was requested."""

    start: float
    end: float
    span: int | None = None
    """Number of the span in the trajectory; set where other spans may be nested in it."""
    within: int | None = None
    """Number of the enclosing span."""


@dataclass(frozen=True, slots=True)
class BeginEvent:
    event: ClassVar[str] = "began"
    attributes: TraceAttributes
    began_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class PromptEvent:
    event: ClassVar[str] = "prompt"
    tokens: AddedTokens


@dataclass(frozen=True, slots=True)
class GenerationEvent:
    """One assistant turn, or the part of it that one server sampled."""

    event: ClassVar[str] = "generate"
    turn: int
    """Number of the assistant turn, from 0."""
    tokens: AddedTokens
    weight_version: int | None
    """Weight version of the last token."""
    time: EventTime | None
    """None where the turn was not observed, such as a turn restored from a journal."""
    server: str = ""
    prefill_s: float | None = None
    num_cached_tokens: int | None = None
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallEvent:
    event: ClassVar[str] = "tool"
    turn: int
    number: int
    """Number of the call within the turn."""
    name: str
    time: EventTime
    arguments: Any = None
    """Set with `token2text`, like `reply`."""
    reply: str | None = None
    reward: float | None = None
    incident: IncidentKind | None = None


@dataclass(frozen=True, slots=True)
class InteractionEvent:
    event: ClassVar[str] = "interaction"
    turn: int
    time: EventTime | None
    reply: str | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class ObservationEvent:
    """Tokens of the replies that tools or an interaction returned to the model."""

    event: ClassVar[str] = "observation"
    turn: int
    origin: Origin
    tokens: AddedTokens


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Any other span: waiting, encoding, scoring, closing, or a span of the user."""

    event: ClassVar[str] = "span"
    kind: str
    name: str
    time: EventTime
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IncidentEvent:
    event: ClassVar[str] = "incident"
    turn: int
    kind: IncidentKind
    detail: str


@dataclass(frozen=True, slots=True)
class RewardEvent:
    event: ClassVar[str] = "reward"
    reward: float | None
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndEvent:
    event: ClassVar[str] = "end"
    stop_reason: StopReason
    seconds: float
    num_turns: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_model_tokens: int
    failure: str | None


Event: TypeAlias = (
    BeginEvent
    | PromptEvent
    | GenerationEvent
    | ToolCallEvent
    | InteractionEvent
    | ObservationEvent
    | SpanEvent
    | IncidentEvent
    | RewardEvent
    | EndEvent
)
