"""Errors in the format of the API that the request uses."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

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

_BAD_REQUESTS = (
    RequestError,
    SamplingParamsError,
    ChatTemplateError,
    DataError,
    BadPrompt,
    FatalRequest,
)
_MESSAGES_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class UnknownModel(RequestError):
    """The request names a model that is not served."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Reply to a request that failed."""

    message: str
    status: int
    """HTTP status, also if the error ends a stream that began with 200."""
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: AgentLoopError) -> ErrorReply:
        """Return the reply for an error."""
        param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
        return cls(str(error), status_of(error), param, code)

    @property
    def kind(self) -> str:
        """Type of the error in OpenAI's format."""
        return "invalid_request_error" if self.status < 500 else "server_error"

    def as_openai(self) -> dict[str, Any]:
        """Return the body in OpenAI's format."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def as_messages_detail(self) -> dict[str, Any]:
        """Return the error in Anthropic's format. Its `code` is an extension: the code in OpenAI's format."""
        kind = _MESSAGES_KINDS.get(self.status, "api_error")
        detail: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code is not None:
            detail["code"] = self.code
        if self.param == "thread":  # tells clients to send whole conversations
            detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return detail


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
