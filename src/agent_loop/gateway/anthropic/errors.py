"""Errors in the shape of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from agent_loop.completions.response_models import ErrorResponse
from agent_loop.gateway.anthropic.events import event

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(reply: ErrorResponse, *, status: int, headers: Mapping[str, str] | None) -> JSONResponse:
    """The answer to a request that failed."""
    body = {"type": "error", "error": _error(reply, kind=_KINDS.get(status, "api_error"))}
    return JSONResponse(body, status_code=status, headers=headers)


def messages_error_event(reply: ErrorResponse) -> bytes:
    """The end of a stream that failed."""
    return event("error", error=_error(reply, kind="api_error"))


def _error(reply: ErrorResponse, *, kind: str) -> dict[str, Any]:
    return {"type": kind, "message": reply.error.message, "code": reply.error.code}
