"""Errors in the format of the Messages API."""

from __future__ import annotations

from agent_loop.completions.anthropic.events import event
from agent_loop.completions.anthropic.requests import MessagesRequest
from agent_loop.completions.anthropic.response_models import (
    MessagesErrorDetail,
    MessagesErrorResponse,
    ThreadRefusal,
)
from agent_loop.completions.response_models import ErrorDetail, ErrorResponse

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(
    response: ErrorResponse, *, status: int, request_id: str | None = None
) -> MessagesErrorResponse:
    """Return the body of the response to a request that failed with this HTTP status."""
    return MessagesErrorResponse(
        error=_error(response, kind=_KINDS.get(status, "api_error")), request_id=request_id
    )


def messages_error_event(response: ErrorResponse) -> bytes:
    """Return the last event of a failed stream."""
    return event("error", error=_error(response, kind="api_error").model_dump())


def _error(response: ErrorResponse, *, kind: str) -> MessagesErrorDetail:
    error = response.error
    details = ThreadRefusal() if error.param == "thread" else None
    return MessagesErrorDetail(type=kind, message=_renamed(error), code=error.code, details=details)


def _renamed(error: ErrorDetail) -> str:
    """Return the message of an error about a chat request, with the name that its parameter has in this API."""
    parameter = error.param or ""
    if parameter in MessagesRequest.names_here and error.message.startswith(parameter):
        return MessagesRequest.names_here[parameter] + error.message.removeprefix(parameter)
    return error.message
