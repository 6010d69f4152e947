"""What a session refuses."""

from __future__ import annotations

from agent_loop.errors import AgentLoopError, RequestError
from agent_loop.types import StopReason

TOO_LONG = "context_length_exceeded"
"""The code by which programs know that they cannot go on with a conversation."""


class LimitReached(RequestError):
    """A limit of the trajectory allows no further turn. Clients do not send such a request again."""


class GatewayBug(AgentLoopError):
    """Something in the gateway or below it raised what it must not."""


def limit_error(reason: StopReason) -> LimitReached:
    """The answer to a request in a conversation that is over."""
    is_length = reason in (StopReason.RESPONSE_LENGTH, StopReason.PROMPT_LENGTH)
    return LimitReached(
        f"this conversation is over ({reason}): a limit of the rollout allows no further turn",
        param="messages",
        code=TOO_LONG if is_length else str(reason),
    )


def too_many_branches(max_branches: int) -> LimitReached:
    """The answer to a request that would begin one more conversation."""
    return LimitReached(
        f"this program has led {max_branches} conversations; raise max_branches if it needs more",
        code="too_many_branches",
    )
