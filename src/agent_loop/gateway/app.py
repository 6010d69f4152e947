"""The application: the endpoints of each session, in two dialects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

from fastapi import APIRouter, FastAPI, Request, Response

from agent_loop import __version__
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_models import (
    ChatCompletionChunk,
    ErrorResponse,
    ModelCard,
    ModelList,
    ResponseModel,
)
from agent_loop.gateway.anthropic.errors import messages_error, messages_error_event
from agent_loop.gateway.anthropic.events import EventWriter
from agent_loop.gateway.anthropic.requests import MessagesRequest
from agent_loop.gateway.anthropic.translation import chat_request_of, message_of
from agent_loop.gateway.gateway import Gateway
from agent_loop.gateway.requests import SessionChatRequest
from agent_loop.gateway.responses import build_completion, stream_chunks
from agent_loop.gateway.retries import RetryInfo
from agent_loop.gateway.session import Session
from agent_loop.gateway.shared_completion import SharedCompletion
from agent_loop.serving.errors import error_json_response, make_error
from agent_loop.serving.handlers import add_error_handlers
from agent_loop.serving.hosts import LOCAL_HOSTS, MISDIRECTED, HostGuard
from agent_loop.serving.middleware import BodyLimiter, StrictRoute
from agent_loop.serving.streams import ClientConnection, EventStream

MODEL_NAME = "agent-loop"
"""What `/v1/models` lists; requests may name any model, and get the one that is trained."""


def create_gateway_app(gateway: Gateway) -> FastAPI:
    """An ASGI application that answers the sessions of a gateway."""
    app = FastAPI(title="agent-loop gateway", version=__version__, docs_url=None, redoc_url=None)
    app.state.stopping = asyncio.Event()
    """Ends the requests in flight once it is set."""
    app.include_router(_GatewayRoutes(gateway, stopping=app.state.stopping).of_sessions())
    add_error_handlers(app, write=_error)
    app.add_middleware(BodyLimiter)
    app.add_middleware(HostGuard, hosts=LOCAL_HOSTS, refuse=_refuse_host)
    return app


class _GatewayRoutes:
    def __init__(self, gateway: Gateway, *, stopping: asyncio.Event) -> None:
        self._gateway = gateway
        self._stopping = stopping
        self._created = int(time.time())

    def of_sessions(self) -> APIRouter:
        router = APIRouter(
            prefix="/sessions/{session_id}/v1", route_class=StrictRoute.admitting(self._check_key)
        )
        router.post("/chat/completions", name="create_chat_completion")(self._chat)
        router.post("/messages", name="create_message")(self._messages)
        router.get("/models", name="list_models")(self._models)
        return router

    async def _chat(self, session_id: str, body: SessionChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        answer = self._session(session_id, request).ask(body, attempt=_retry_info(request))
        if body.stream:
            return await self._streamed(body, answer, request, shape=None)
        reply = await self._connection(request).hold(build_completion(body, answer))
        return _json(reply)

    async def _messages(self, session_id: str, body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in the Messages dialect."""
        session = self._session(session_id, request)
        chat = chat_request_of(body)
        answer = session.ask(chat, attempt=_retry_info(request))
        if body.stream:
            shape = EventWriter(shows_thinking=body.shows_thinking)
            return await self._streamed(chat, answer, request, shape=shape)
        reply = await self._connection(request).hold(build_completion(chat, answer))
        return _json(message_of(reply, shows_thinking=body.shows_thinking))

    async def _models(self, session_id: str, request: Request) -> Response:
        """List what is served."""
        self._session(session_id, request)
        card = ModelCard(id=MODEL_NAME, created=self._created, owned_by="agent-loop")
        return _json(ModelList(data=[card]))

    async def _streamed(
        self,
        body: ChatCompletionRequest,
        answer: SharedCompletion,
        request: Request,
        *,
        shape: EventWriter | None,
    ) -> Response:
        connection = self._connection(request)
        source = stream_chunks(body, answer)
        try:
            first = await connection.hold(_first_of(source))
        except BaseException:
            await source.aclose()
            raise
        if shape is None:
            return EventStream(first, source, connection=connection)
        return EventStream(
            first,
            source,
            connection=connection,
            write=shape.write,
            write_error=messages_error_event,
            end=shape.end,
        )

    def _connection(self, request: Request) -> ClientConnection:
        return ClientConnection(request.receive, self._stopping)

    def _check_key(self, request: Request) -> None:
        self._session(request.path_params["session_id"], request)

    def _session(self, session_id: str, request: Request) -> Session:
        shown = request.headers.get("x-api-key")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._gateway.get(session_id, key=token if scheme.lower() == "bearer" else shown)


async def _first_of(source: AsyncGenerator[ChatCompletionChunk]) -> ResponseModel | None:
    return await anext(source, None)


def _retry_info(request: Request) -> RetryInfo:
    num_retries = 0
    with suppress(ValueError):
        num_retries = int(request.headers.get("x-stainless-retry-count", "0"))
    return RetryInfo(num_retries=num_retries, idempotency_key=request.headers.get("idempotency-key"))


def _error(
    request: Request, reply: ErrorResponse, status: int, headers: Mapping[str, str] | None
) -> Response:
    if request.url.path.endswith("/messages"):
        return messages_error(reply, status=status, headers=headers)
    return error_json_response(reply, status=status, headers=headers)


def _refuse_host(request: Request, message: str) -> Response:
    return _error(request, make_error(message, status=MISDIRECTED), MISDIRECTED, None)


def _json(reply: ResponseModel) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")
