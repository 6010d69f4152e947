"""The gateway's HTTP application: the OpenAI and Anthropic endpoints of each session."""

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
from agent_loop.gateway.anthropic.translation import to_chat_request, to_message
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
"""Model name that `/v1/models` lists. Requests may name any model; the model in training answers."""


def create_gateway_app(gateway: Gateway) -> FastAPI:
    """Return an ASGI application that serves the sessions of a gateway."""
    app = FastAPI(title="agent-loop gateway", version=__version__, docs_url=None, redoc_url=None)
    app.state.stopping = asyncio.Event()
    """Aborts in-flight requests once it is set."""
    app.include_router(_GatewayRoutes(gateway, stopping=app.state.stopping).session_router())
    add_error_handlers(app, write=_write_error)
    app.add_middleware(BodyLimiter)
    app.add_middleware(HostGuard, hosts=LOCAL_HOSTS, refuse=_refuse_host)
    return app


class _GatewayRoutes:
    def __init__(self, gateway: Gateway, *, stopping: asyncio.Event) -> None:
        self._gateway = gateway
        self._stopping = stopping
        self._created = int(time.time())

    def session_router(self) -> APIRouter:
        router = APIRouter(
            prefix="/sessions/{session_id}/v1", route_class=StrictRoute.admitting(self._check_key)
        )
        router.post("/chat/completions", name="create_chat_completion")(self._chat)
        router.post("/messages", name="create_message")(self._messages)
        router.get("/models", name="list_models")(self._models)
        return router

    async def _chat(self, session_id: str, body: SessionChatRequest, request: Request) -> Response:
        """Complete a conversation."""
        shared = self._session(session_id, request).submit(body, retry=_retry_info(request))
        if body.stream:
            return await self._stream(body, shared, request, event_writer=None)
        completion = await self._connection(request).run(build_completion(body, shared))
        return _json(completion)

    async def _messages(self, session_id: str, body: MessagesRequest, request: Request) -> Response:
        """Complete a conversation of the Anthropic Messages API."""
        session = self._session(session_id, request)
        chat = to_chat_request(body)
        shared = session.submit(chat, retry=_retry_info(request))
        if body.stream:
            event_writer = EventWriter(shows_thinking=body.shows_thinking)
            return await self._stream(chat, shared, request, event_writer=event_writer)
        completion = await self._connection(request).run(build_completion(chat, shared))
        return _json(to_message(completion, shows_thinking=body.shows_thinking))

    async def _models(self, session_id: str, request: Request) -> Response:
        """List the model."""
        self._session(session_id, request)
        card = ModelCard(id=MODEL_NAME, created=self._created, owned_by="agent-loop")
        return _json(ModelList(data=[card]))

    async def _stream(
        self,
        body: ChatCompletionRequest,
        shared: SharedCompletion,
        request: Request,
        *,
        event_writer: EventWriter | None,
    ) -> Response:
        connection = self._connection(request)
        chunks = stream_chunks(body, shared)
        try:
            first = await connection.run(_next_or_none(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        if event_writer is None:
            return EventStream(first, chunks, connection=connection)
        return EventStream(
            first,
            chunks,
            connection=connection,
            write=event_writer.write,
            write_error=messages_error_event,
            end=event_writer.end,
        )

    def _connection(self, request: Request) -> ClientConnection:
        return ClientConnection(request.receive, self._stopping)

    def _check_key(self, request: Request) -> None:
        self._session(request.path_params["session_id"], request)

    def _session(self, session_id: str, request: Request) -> Session:
        api_key = request.headers.get("x-api-key")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._gateway.get(session_id, key=token if scheme.lower() == "bearer" else api_key)


async def _next_or_none(chunks: AsyncGenerator[ChatCompletionChunk]) -> ResponseModel | None:
    return await anext(chunks, None)


def _retry_info(request: Request) -> RetryInfo:
    num_retries = 0
    with suppress(ValueError):
        num_retries = int(request.headers.get("x-stainless-retry-count", "0"))
    return RetryInfo(num_retries=num_retries, idempotency_key=request.headers.get("idempotency-key"))


def _write_error(
    request: Request, error: ErrorResponse, status: int, headers: Mapping[str, str] | None
) -> Response:
    if request.url.path.endswith("/messages"):
        return messages_error(error, status=status, headers=headers)
    return error_json_response(error, status=status, headers=headers)


def _refuse_host(request: Request, message: str) -> Response:
    return _write_error(request, make_error(message, status=MISDIRECTED), MISDIRECTED, None)


def _json(response: ResponseModel) -> Response:
    return Response(response.model_dump_json(), media_type="application/json")
