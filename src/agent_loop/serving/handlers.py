"""Exceptions to answers, for every application that is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from agent_loop.completions.requests import ChatCompletionRequest, request_error
from agent_loop.completions.response_models import ErrorResponse
from agent_loop.errors import AgentLoopError
from agent_loop.serving.errors import (
    CLIENT_CLOSED_REQUEST,
    error_json_response,
    error_response_of,
    make_error,
    status_of,
)
from agent_loop.serving.streams import ClientDisconnected

WriteError: TypeAlias = Callable[[Request, ErrorResponse, int, Mapping[str, str] | None], Response]
"""Writes an error for whoever asked: the request, what is wrong, the status, more headers."""


def _as_openai(_: Request, reply: ErrorResponse, status: int, headers: Mapping[str, str] | None) -> Response:
    return error_json_response(reply, status=status, headers=headers)


def add_error_handlers(app: FastAPI, *, write: WriteError = _as_openai) -> None:
    """Has an application answer whatever is raised in it."""

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, AgentLoopError)
        return write(request, error_response_of(error), status_of(error), None)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        fault = request_error(error.errors(), known=ChatCompletionRequest)
        return write(request, error_response_of(fault), 400, None)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code)
        reply = make_error(str(error.detail), status=error.status_code, code=code)
        return write(request, reply, error.status_code, error.headers)

    async def on_client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_bug(request: Request, error: Exception) -> Response:
        message = f"a fault of the server: {type(error).__name__}; its log says more"
        return write(request, make_error(message, status=500), 500, None)

    handlers: Mapping[type[Exception], Any] = {
        AgentLoopError: on_error,
        RequestValidationError: on_invalid,
        HTTPException: on_http_error,
        ClientDisconnected: on_client_gone,
        Exception: on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


_CODES = {401: "invalid_api_key", 404: "not_found", 410: "session_closed", 413: "body_too_large"}
