"""What happened to a trajectory: incidents, feedback, its failure, and the time that it spent by activity."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from agent_loop.types import Origin


class IncidentKind(StrEnum):
    """Kind of a problem or loss in a trajectory that nevertheless continued or ended normally."""

    MALFORMED_CALL = "malformed_call"
    INVALID_TURN = "invalid_turn"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    TOOL_UNAVAILABLE = "tool_unavailable"
    UNEXECUTED_CALL = "unexecuted_call"
    TRUNCATED_REPLY = "truncated_reply"
    DROPPED_OBSERVATION = "dropped_observation"
    CUT_TURN = "cut_turn"
    TRUNCATED_PROMPT = "truncated_prompt"
    TRUNCATED_RESPONSE = "truncated_response"
    UNMATCHED_TOKENS = "unmatched_tokens"
    CLOSE_FAILED = "close_failed"
    INTERRUPTED_CALL = "interrupted_call"
    RESTARTED = "restarted"
    RETRIED = "retried"
    """A failure of infrastructure ended an attempt, and the trajectory ran again."""
    GENERATE_TIMEOUT = "generate_timeout"
    TURN_TIMEOUT = "turn_timeout"
    FAILED_REQUEST = "failed_request"
    DROPPED_PARAMETER = "dropped_parameter"
    """A request's parameter that cannot be honoured was ignored."""
    UNMET_REQUEST = "unmet_request"
    """A completion is not what its request demanded, such as a tool call or JSON."""
    SYSTEM_MESSAGE_AS_USER = "system_message_as_user"
    REWRITTEN_CALL = "rewritten_call"
    ABANDONED = "abandoned"
    UNSTORABLE_VALUE = "unstorable_value"


class Incident(Struct, frozen=True):
    """Named problem or loss in a trajectory."""

    kind: IncidentKind
    detail: str
    """One line of text for people."""
    assistant_turn: int = 0
    """Number of assistant turns before the incident."""


class Feedback(Struct, frozen=True):
    """Result of a tool call or of an interaction's reply for its turn, apart from the text."""

    origin: Origin
    """`TOOL` or `INTERACTION`."""
    name: str = ""
    """Name of the tool."""
    place: int | None = None
    """Position of the turn's last token in the response; None if the model had not sampled a token yet."""
    reward: float | None = None
    incident: IncidentKind | None = None
    """Why the call failed; None if it did not fail."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further values that the tool or the interaction returned."""


class FailureKind(StrEnum):
    """What failed a trajectory. All kinds but `CODE` are failures of infrastructure."""

    CODE = "code"
    """Code of the user or of this package, or a row that cannot be used."""
    ENVIRONMENT = "environment"
    """An environment could not be reached, ended, or exceeded its time limit."""
    INTERACTION = "interaction"
    """A service that an interaction needs could not be reached."""
    WORKSPACE = "workspace"
    """A workspace or sandbox could not be started, or ended."""
    SERVER = "server"
    """An LLM server failed, and no other server completed the request."""
    REWARD = "reward"
    """A judge could not be reached, or a reward function exceeded its time limit."""
    WORKER = "worker"
    """The worker processes that ran the row died, the last one while it ran no other row."""


class Failure(Struct, frozen=True):
    """The exception that ended a trajectory with `StopReason.FAILED`."""

    error: str
    """Type and message on one line. Failures are counted by this text."""
    traceback: str
    kind: FailureKind = FailureKind.CODE

    @property
    def is_infrastructure(self) -> bool:
        """Whether the failure says nothing about the policy. The trajectory is left out of all statistics."""
        return self.kind is not FailureKind.CODE

    @property
    def is_retried(self) -> bool:
        """Whether another attempt may succeed. Requests to LLM servers were already sent again, to other servers, and
        rows whose workers died ran again, in other workers."""
        return self.kind not in (FailureKind.CODE, FailureKind.SERVER, FailureKind.WORKER)


class Span(Struct, frozen=True):
    """Period in which a trajectory waited for something or its loop ran."""

    kind: str
    """A `WaitKind`."""
    name: str
    """Name of the server or tool, if there are several."""
    start: float
    """Seconds since the trajectory was requested."""
    end: float
    details: Mapping[str, Any] = {}
    """Further values; `docs/tracing.md` lists the keys of each kind."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace(Struct, frozen=True):
    """Spans of one trajectory. All branches of a rollout share one trace."""

    began_at: float
    """Time of the request for the trajectory, in seconds since 1970."""
    seconds: float
    """Seconds from `began_at` until the trajectory was scored."""
    spans: tuple[Span, ...]
    """Ordered by their ends. Spans can contain each other or overlap."""
