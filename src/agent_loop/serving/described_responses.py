"""Descriptions of responses, for the OpenAPI schemas of `agent-loop serve` and of the gateway."""

from __future__ import annotations

from typing import Any, TypeAlias

from agent_loop.completions.anthropic.response_models import MessagesErrorResponse
from agent_loop.completions.response_models import ErrorResponse

Responses: TypeAlias = dict[int | str, dict[str, Any]]
"""Responses by status, in the form that FastAPI takes."""

STREAMED: Responses = {200: {"content": {"text/event-stream": {}}}}
"""A response that may be a stream."""


def _errors(model: Any) -> Responses:
    return {"4XX": {"model": model}, "5XX": {"model": model}}


OPENAI_ERRORS = _errors(ErrorResponse)
MESSAGES_ERRORS = _errors(MessagesErrorResponse)
MODEL_ERRORS = _errors(ErrorResponse | MessagesErrorResponse)
"""Errors of routes that answer in the format that the client's headers ask for."""
