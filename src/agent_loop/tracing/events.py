"""What is told of a finished trajectory: one event per thing that happened, each with what is new in it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from agent_loop.trajectory import IncidentKind
from agent_loop.types import Origin, StopReason, TokenIds

ROOT_NAME = "agent_loop"


@dataclass(frozen=True, slots=True)
class TraceAttributes:
    """By which a trajectory is found."""

    trajectory_id: str
    step: int | None
    """Of the training; None outside of one."""
    sample_index: int
    """The row's `index`, or its place among the rows."""
    rollout_n: int
    """Which of the row's samples."""
    validate: bool
    agent_name: str
    experiment_name: str
    name: str = ROOT_NAME

    def named(self) -> dict[str, Any]:
        """All but the name of the trace, by name."""
        values = asdict(self)
        del values["name"]
        return values


@dataclass(frozen=True, slots=True)
class Tokens:
    """What was added to the context: ids, or their text where `token2text` asks for it."""

    place: int
    """Of the first one in prompt and response together."""
    count: int
    ids: TokenIds | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds since the trajectory was asked for."""

    start: float
    end: float
    span: int | None = None
    """Its number in the trajectory, where others may lie within it."""
    within: int | None = None
    """The number of the one in which it lies."""


@dataclass(frozen=True, slots=True)
class Began:
    event: ClassVar[str] = "began"
    attributes: TraceAttributes
    began_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Prompted:
    event: ClassVar[str] = "prompt"
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Generated:
    """One assistant turn, or what one server did of it."""

    event: ClassVar[str] = "generate"
    turn: int
    """The first is 0."""
    tokens: Tokens
    weight_version: int | None
    """Of its last token."""
    time: Time | None
    """None where it was not watched, as a turn that a journal gave."""
    server: str = ""
    prefill_s: float | None = None
    num_cached_tokens: int | None = None
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class CalledTool:
    event: ClassVar[str] = "tool"
    turn: int
    number: int
    """Which call of the turn."""
    name: str
    time: Time
    arguments: Any = None
    """With `token2text`, as the reply."""
    reply: str | None = None
    reward: float | None = None
    incident: IncidentKind | None = None


@dataclass(frozen=True, slots=True)
class Interacted:
    event: ClassVar[str] = "interaction"
    turn: int
    time: Time | None
    reply: str | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What tools or an interaction said to the model."""

    event: ClassVar[str] = "observation"
    turn: int
    origin: Origin
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Waited:
    """Any other span: waiting, encoding, scoring, closing, the user's own."""

    event: ClassVar[str] = "span"
    kind: str
    name: str
    time: Time
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lost:
    event: ClassVar[str] = "incident"
    turn: int
    kind: IncidentKind
    detail: str


@dataclass(frozen=True, slots=True)
class Rewarded:
    event: ClassVar[str] = "reward"
    reward: float | None
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    event: ClassVar[str] = "end"
    stop_reason: StopReason
    seconds: float
    num_turns: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_model_tokens: int
    failure: str | None


Event: TypeAlias = (
    Began | Prompted | Generated | CalledTool | Interacted | Observed | Waited | Lost | Rewarded | Ended
)
