"""Paths, names and responses of the routes that `agent-loop serve` and the gateway both have.

The handlers of the two applications differ. What the OpenAPI schema says of their routes does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from fastapi import APIRouter

from agent_loop.completions.anthropic.response_models import (
    MessageResponse,
    MessagesErrorResponse,
    ModelInfo,
    ModelInfoList,
    TokenCount,
)
from agent_loop.completions.response_models import ChatCompletion, ErrorResponse, ModelCard, ModelList
from agent_loop.completions.responses.response_models import (
    DeletedResponse,
    InputItemList,
    ResponseObject,
)

Handler: TypeAlias = Callable[..., Any]
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


def add_chat_route(router: APIRouter, *, create: Handler) -> None:
    """Add the route of chat completions."""
    path, name = "/chat/completions", "create_chat_completion"
    router.post(path, name=name, response_model=ChatCompletion, responses=STREAMED)(create)


def add_messages_routes(router: APIRouter, *, create: Handler, count_tokens: Handler) -> None:
    """Add the routes of Anthropic's messages."""
    streamed = {**STREAMED, **MESSAGES_ERRORS}
    router.post("/messages", name="create_message", response_model=MessageResponse, responses=streamed)(
        create
    )
    path, name = "/messages/count_tokens", "count_message_tokens"
    router.post(path, name=name, response_model=TokenCount, responses=MESSAGES_ERRORS)(count_tokens)


def add_model_routes(router: APIRouter, *, list_models: Handler, describe: Handler) -> None:
    """Add the routes that describe models."""
    either = ModelList | ModelInfoList
    router.get("/models", name="list_models", response_model=either, responses=MODEL_ERRORS)(list_models)
    path, name = "/models/{name:path}", "describe_model"
    router.get(path, name=name, response_model=ModelCard | ModelInfo, responses=MODEL_ERRORS)(describe)


def add_responses_routes(
    router: APIRouter,
    *,
    create: Handler,
    retrieve: Handler,
    delete: Handler,
    cancel: Handler,
    list_input_items: Handler,
) -> None:
    """Add the routes of the Responses API."""
    one = "/responses/{response_id}"
    router.post("/responses", name="create_response", response_model=ResponseObject, responses=STREAMED)(
        create
    )
    router.get(one, name="retrieve_response", response_model=ResponseObject)(retrieve)
    router.delete(one, name="delete_response", response_model=DeletedResponse)(delete)
    router.post(f"{one}/cancel", name="cancel_response", response_model=ResponseObject)(cancel)
    path, name = f"{one}/input_items", "list_input_items"
    router.get(path, name=name, response_model=InputItemList)(list_input_items)
