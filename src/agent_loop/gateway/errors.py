"""Errors of gateway sessions."""

from __future__ import annotations

from agent_loop.errors import AgentLoopError, EpisodeError, RequestError
from agent_loop.trajectory import Failure
from agent_loop.types import StopReason

TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a conversation that cannot get longer."""


class LimitReached(RequestError):
    """A limit of the trajectory allows no further turn. Clients do not retry such a request."""


class GatewayBug(AgentLoopError):
    """An unexpected exception in the gateway or in a layer below it."""


class ProgramFailed(EpisodeError):
    """A program reported a failure."""

    def __init__(self, error: str, *, traceback: str) -> None:
        super().__init__(error)
        self.failure = Failure(error=error, traceback=traceback)


def limit_error(reason: StopReason) -> LimitReached:
    """Return the error for a request in a conversation that has ended."""
    is_length = reason in (StopReason.RESPONSE_LENGTH, StopReason.PROMPT_LENGTH)
    return LimitReached(
        f"this conversation is over ({reason}): a limit of the rollout allows no further turn",
        param="messages",
        code=TOO_LONG if is_length else str(reason),
    )


def branch_limit_error(max_branches: int) -> LimitReached:
    """Return the error for a request that would exceed `max_branches`."""
    return LimitReached(
        f"this program has {max_branches} conversations already; raise max_branches if it needs more",
        code="too_many_branches",
    )
