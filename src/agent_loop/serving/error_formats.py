"""Error responses in the format of the API that the request uses."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from agent_loop.completions.anthropic.errors import messages_error
from agent_loop.completions.response_models import ErrorResponse
from agent_loop.serving.errors import error_json_response


def write_error(
    request: Request, error: ErrorResponse, status: int, headers: Mapping[str, str] | None
) -> Response:
    """Return the HTTP response for a failed request."""
    if uses_messages_api(request):
        return JSONResponse(messages_error(error, status=status), status_code=status, headers=headers)
    return error_json_response(error, status=status, headers=headers)


def uses_messages_api(request: Request) -> bool:
    """Return whether a request comes from a client of the Anthropic Messages API."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path
