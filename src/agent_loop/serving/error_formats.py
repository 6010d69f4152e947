"""Error responses in the format of the API that the request uses."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response

from agent_loop.completions.anthropic.errors import messages_error
from agent_loop.completions.response_models import ErrorResponse
from agent_loop.serving.errors import error_json_response
from agent_loop.serving.model_descriptions import VERSION_HEADER
from agent_loop.serving.request_ids import request_id_of
from agent_loop.serving.streams import json_response


def write_error(
    request: Request, error: ErrorResponse, status: int, headers: Mapping[str, str] | None
) -> Response:
    """Return the HTTP response for a failed request."""
    if not uses_messages_api(request):
        return error_json_response(error, status=status, headers=headers)
    body = messages_error(error, status=status, request_id=request_id_of(request))
    response = json_response(body, status=status)
    response.headers.update(headers or {})
    return response


def uses_messages_api(request: Request) -> bool:
    """Return whether a request uses the Anthropic Messages API, or a path that both APIs have with its header."""
    path = request.url.path
    return "/v1/messages" in path or (VERSION_HEADER in request.headers and "/v1/models" in path)
