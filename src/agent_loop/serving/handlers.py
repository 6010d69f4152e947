"""Exception handlers of the HTTP applications."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from agent_loop.completions.fields import RequestModel
from agent_loop.completions.requests import ChatCompletionRequest, request_error
from agent_loop.errors import AgentLoopError
from agent_loop.serving.error_formats import write_error
from agent_loop.serving.errors import CLIENT_CLOSED_REQUEST, error_response_of, make_error, status_of
from agent_loop.serving.offered_paths import unknown_path_message
from agent_loop.serving.streams import ClientDisconnected


def add_error_handlers(
    app: FastAPI, *, on_refused: Callable[[Request, AgentLoopError], None] | None = None
) -> None:
    """Add handlers that turn every exception of an application into an error response in the format of its API.

    Args:
        app: The application.
        on_refused: Called with each request that is refused with status 400.
    """

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, AgentLoopError)
        if on_refused is not None and status_of(error) == HTTPStatus.BAD_REQUEST:
            on_refused(request, error)
        return write_error(request, error_response_of(error), status_of(error), None)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        invalid = request_error(error.errors(), known=_body_model(request))
        return write_error(request, error_response_of(invalid), 400, None)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code)
        is_unknown = error.detail in _UNKNOWN_PATH  # raised by the router, and not by a route
        message = unknown_path_message(request) if is_unknown else str(error.detail)
        response = make_error(message, status=error.status_code, code=code)
        return write_error(request, response, error.status_code, error.headers)

    async def on_client_disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_bug(request: Request, error: Exception) -> Response:
        message = f"internal error: {type(error).__name__}; the server's log has the traceback"
        return write_error(request, make_error(message, status=500), 500, None)

    handlers: Mapping[type[Exception], Any] = {
        AgentLoopError: on_error,
        RequestValidationError: on_invalid,
        HTTPException: on_http_error,
        ClientDisconnected: on_client_disconnected,
        Exception: on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _body_model(request: Request) -> type[RequestModel]:
    """Return the model of the body that a route takes, whose fields an error may suggest."""
    body: Any = getattr(request.scope.get("route"), "body_field", None)
    model: Any = None if body is None else body.field_info.annotation
    return model if isinstance(model, type) and issubclass(model, RequestModel) else ChatCompletionRequest


_UNKNOWN_PATH = ("Not Found", "Method Not Allowed")
_CODES = {401: "invalid_api_key", 404: "not_found", 410: "session_closed", 413: "body_too_large"}
