"""What happened to a trajectory beside its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from agent_loop.types import Origin


class IncidentKind(StrEnum):
    """What went wrong, or was left out, on a trajectory that went on or ended in good order."""

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
    GENERATE_TIMEOUT = "generate_timeout"
    TURN_TIMEOUT = "turn_timeout"
    FAILED_REQUEST = "failed_request"
    ABANDONED = "abandoned"
    UNSTORABLE_VALUE = "unstorable_value"


class Incident(Struct, frozen=True):
    """One named loss."""

    kind: IncidentKind
    detail: str
    """One line for a person to read."""
    assistant_turn: int = 0
    """How many assistant turns there had been."""


class Feedback(Struct, frozen=True):
    """What a call of a tool, or a reply of the interaction, brought the turn that asked for it, beside its words."""

    origin: Origin
    """`TOOL` or `INTERACTION`."""
    name: str = ""
    """The tool's."""
    place: int | None = None
    """Where in the response the turn's last token is; None where the model had said nothing yet."""
    reward: float | None = None
    incident: IncidentKind | None = None
    """Why the call did not work, where it did not."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the tool or the interaction returned."""


class Failure(Struct, frozen=True):
    """The exception that ended a trajectory with `StopReason.FAILED`."""

    error: str
    """Type and message, on one line: the key by which failures are counted."""
    traceback: str
