"""Error responses in the format of the API that the request uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

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
from agent_loop.serve.chat_replies import ErrorDetail, ErrorResponse, ResponseModel
from agent_loop.serve.messages_replies import messages_error
from agent_loop.servers.http import HttpStatusError

CLIENT_CLOSED_REQUEST = 499
"""Status under which requests are counted whose client disconnected before the response."""
VERSION_HEADER = "anthropic-version"
"""Header that clients of Anthropic send."""
_BAD_REQUESTS = (
    RequestError,
    SamplingParamsError,
    ChatTemplateError,
    DataError,
    BadPrompt,
    FatalRequest,
)
_CODES = {401: "invalid_api_key", 404: "not_found", 410: "session_closed", 413: "body_too_large"}
_UNKNOWN_PATH = ("Not Found", "Method Not Allowed")
"""Details of errors that the router raises, and not a route."""


class UnknownModel(RequestError):
    """The request names a model that is not served."""


class ClientDisconnected(Exception):
    """The client disconnected before it got a response."""


def status_of(error: AgentLoopError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, UnknownModel):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, _BAD_REQUESTS):
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


def json_response(value: ResponseModel | Mapping[str, Any], *, status: int = 200) -> Response:
    """Return a value as JSON."""
    body = to_json(value, inf_nan_mode="null")
    return Response(body, status_code=status, media_type="application/json")


def write_error(
    request: Request, error: ErrorResponse, *, status: int, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the HTTP response for a failed request."""
    path = request.url.path
    if "/v1/messages" in path or (VERSION_HEADER in request.headers and "/v1/models" in path):
        request_id = getattr(request.state, "request_id", None)
        response = json_response(messages_error(error, status=status, request_id=request_id), status=status)
    else:
        response = json_response(error, status=status)
    response.headers.update(headers or {})
    return response


def exception_handlers(
    *, offered: Callable[[], str], on_refused: Callable[[Request, AgentLoopError], None] | None = None
) -> Mapping[Any, Any]:
    """Return the handlers that turn every exception of an application into an error response.

    Args:
        offered: Returns the methods and paths that the application has.
        on_refused: Called with each request that is refused with status 400.
    """

    async def on_error(request: Request, error: AgentLoopError) -> Response:
        if on_refused is not None and status_of(error) == HTTPStatus.BAD_REQUEST:
            on_refused(request, error)
        return write_error(request, error_response_of(error), status=status_of(error))

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if message in _UNKNOWN_PATH:
            path = request.url.path
            if path.startswith("/sessions/"):
                path = "/" + path.removeprefix("/sessions/").partition("/")[2]
            message = f"there is no {request.method} {path}; offered are {offered()}"
        response = make_error(message, status=error.status_code, code=_CODES.get(error.status_code))
        return write_error(request, response, status=error.status_code, headers=error.headers)

    async def on_client_disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_bug(request: Request, error: Exception) -> Response:
        message = f"internal error: {type(error).__name__}; the server's log has the traceback"
        return write_error(request, make_error(message, status=500), status=500)

    return {
        AgentLoopError: on_error,
        HTTPException: on_http_error,
        ClientDisconnected: on_client_disconnected,
        ClientDisconnect: on_client_disconnected,
        Exception: on_bug,
    }
