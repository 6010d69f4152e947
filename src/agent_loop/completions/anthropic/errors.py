"""Errors in the format of the Messages API."""

from __future__ import annotations

from typing import Any

from agent_loop.completions.anthropic.events import event
from agent_loop.completions.response_models import ErrorResponse

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(response: ErrorResponse, *, status: int) -> dict[str, Any]:
    """Return the body of the response to a request that failed with this HTTP status."""
    return {"type": "error", "error": _error(response, kind=_KINDS.get(status, "api_error"))}


def messages_error_event(response: ErrorResponse) -> bytes:
    """Return the last event of a failed stream."""
    return event("error", error=_error(response, kind="api_error"))


def _error(response: ErrorResponse, *, kind: str) -> dict[str, Any]:
    return {"type": kind, "message": response.error.message, "code": response.error.code}
