"""Error responses in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi.responses import JSONResponse

from agent_loop.completions.response_models import ErrorDetail, ErrorResponse
from agent_loop.errors import (
    AgentLoopError,
    BadPrompt,
    BadServerReply,
    ChatTemplateError,
    DataError,
    FatalRequest,
    RequestError,
    SamplingParamsError,
    ServerTimeout,
)
from agent_loop.servers.http import HttpStatusError

CLIENT_CLOSED_REQUEST = 499
"""Status under which requests are counted whose client disconnected before the response."""


def status_of(error: AgentLoopError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(
        error, RequestError | SamplingParamsError | ChatTemplateError | DataError | BadPrompt | FatalRequest
    ):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, HttpStatusError) and error.status in (400, 413, 422):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, ServerTimeout):
        return HTTPStatus.GATEWAY_TIMEOUT
    if isinstance(error, BadServerReply):
        return HTTPStatus.BAD_GATEWAY
    return HTTPStatus.SERVICE_UNAVAILABLE


def make_error(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> ErrorResponse:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def error_response_of(error: AgentLoopError) -> ErrorResponse:
    """Return the response body for an error."""
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return make_error(str(error), status=status_of(error), param=param, code=code)


def error_json_response(
    response: ErrorResponse, *, status: int, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(response.model_dump(), status_code=status, headers=headers)
