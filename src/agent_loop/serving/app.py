"""The HTTP application of `agent-loop serve`: routes, errors and API key."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from agent_loop import __version__
from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.chat import chat_completion, stream_chat_completion
from agent_loop.completions.requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from agent_loop.completions.response_models import (
    ChatCompletion,
    ErrorResponse,
    ModelCard,
    ModelList,
    ResponseModel,
    TextCompletion,
)
from agent_loop.completions.sampling import Sampler
from agent_loop.completions.text import completion, stream_completion
from agent_loop.errors import RequestError
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.serving.errors import error_json_response, make_error
from agent_loop.serving.handlers import add_error_handlers
from agent_loop.serving.health import HealthResponse, health_of
from agent_loop.serving.hosts import MISDIRECTED, HostGuard
from agent_loop.serving.metered_sampler import MeteredSampler
from agent_loop.serving.metrics import CONTENT_TYPE, Metrics
from agent_loop.serving.middleware import BodyLimiter, RequestCounter, StrictRoute
from agent_loop.serving.sessions import SessionTable
from agent_loop.serving.streams import ClientConnection, EventStream

RequestT = TypeVar("RequestT", bound=SamplingRequest, contravariant=True)
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
SessionHeader = Annotated[str | None, Header(alias="x-session-id", min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and how an application serves it."""

    pool: AsyncLLMServerManager
    """Servers of the model. The caller starts and closes the pool."""
    template: ChatTemplate
    model: str
    """Name of the model in requests."""
    max_model_len: int | None = None
    """Maximum context length in tokens; None leaves the check to the servers."""
    api_key: str | None = None
    """API key that clients must send; None allows requests without a key."""
    hosts: frozenset[str] | None = None
    """Host names that requests may use; None allows any. See `answered_hosts`."""
    why_no_tools: str = ""
    """Reason why requests with tools are refused; empty if tools are supported."""
    created: int = field(default_factory=lambda: int(time.time()))


def create_app(served: ServedModel) -> FastAPI:
    """Return an ASGI application that serves the OpenAI API from a pool of servers."""
    app = FastAPI(title="agent-loop", version=__version__, docs_url=None, redoc_url=None)
    app.state.stopping = asyncio.Event()
    """Aborts in-flight requests once it is set."""
    routes = _ServingRoutes(served, stopping=app.state.stopping)
    app.include_router(routes.api_router())
    app.include_router(routes.monitoring_router())
    add_error_handlers(app)
    app.add_exception_handler(UnknownModel, _on_unknown_model)
    app.add_middleware(BodyLimiter)
    app.add_middleware(HostGuard, hosts=served.hosts, refuse=_refuse_host)
    app.add_middleware(RequestCounter, metrics=routes.metrics)
    return app


class _CompleteFunction(Protocol[RequestT]):
    def __call__(
        self, request: RequestT, /, *, template: ChatTemplate, sampler: Sampler, session: str | None
    ) -> Coroutine[Any, Any, ResponseModel]: ...


class _StreamFunction(Protocol[RequestT]):
    def __call__(
        self, request: RequestT, /, *, template: ChatTemplate, sampler: Sampler, session: str | None
    ) -> AsyncGenerator[ResponseModel]: ...


class _ServingRoutes:
    def __init__(self, served: ServedModel, *, stopping: asyncio.Event) -> None:
        self.metrics = Metrics()
        self._stopping = stopping
        self._served = served
        self._sampler = MeteredSampler(
            served.pool.sampler, metrics=self.metrics, max_model_len=served.max_model_len
        )
        self._sessions = SessionTable(self._sampler)

    def api_router(self) -> APIRouter:
        """Return the routes that require the API key."""
        admit = None if self._served.api_key is None else self._check_key
        # The security scheme is only for the OpenAPI description. `admit` checks the key before the body is read.
        described = [] if admit is None else [Depends(HTTPBearer(auto_error=False))]
        router = APIRouter(
            prefix="/v1",
            responses=ERRORS,
            dependencies=described,
            route_class=StrictRoute.admitting(admit),
        )
        router.post(
            "/chat/completions",
            name="create_chat_completion",
            response_model=ChatCompletion,
            responses=STREAMED,
        )(self._chat)
        router.post(
            "/completions", name="create_completion", response_model=TextCompletion, responses=STREAMED
        )(self._complete)
        router.get("/models", name="list_models", response_model=ModelList)(self._models)
        router.get("/models/{name:path}", name="describe_model", response_model=ModelCard)(self._model)
        return router

    def monitoring_router(self) -> APIRouter:
        """Return the routes that require no API key."""
        router = APIRouter(responses=ERRORS)
        unwell: dict[int | str, dict[str, Any]] = {503: {"model": HealthResponse}}
        router.get("/health", name="health", response_model=HealthResponse, responses=unwell)(self._health)
        text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
        router.get("/metrics", name="metrics", response_class=Response, responses=text)(self._metrics_text)
        return router

    async def _chat(
        self, body: ChatCompletionRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a conversation."""
        if body.tools_in_use and self._served.why_no_tools:
            raise RequestError(f"tools: {self._served.why_no_tools}", param="tools")
        return await self._respond(
            body, request, session, complete=chat_completion, stream=stream_chat_completion
        )

    async def _complete(
        self, body: CompletionRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a text or token ids."""
        return await self._respond(body, request, session, complete=completion, stream=stream_completion)

    async def _respond(
        self,
        body: RequestT,
        request: Request,
        session: str | None,
        *,
        complete: _CompleteFunction[RequestT],
        stream: _StreamFunction[RequestT],
    ) -> Response:
        self._check_model(body.model)
        name = session or body.session_id
        connection = ClientConnection(request.receive, self._stopping)
        if body.stream:
            chunks = self._stream(body, name, stream)
            try:
                first = await connection.run(_next_or_none(chunks))
            except BaseException:
                await chunks.aclose()
                raise
            return EventStream(first, chunks, connection=connection)
        with self._sessions.use(name) as own_session:
            result = await connection.run(
                complete(body, template=self._served.template, sampler=self._sampler, session=own_session)
            )
        return _json(result)

    async def _stream(
        self, body: RequestT, name: str | None, stream: _StreamFunction[RequestT]
    ) -> AsyncGenerator[ResponseModel]:
        with self._sessions.use(name) as session:
            chunks = stream(body, template=self._served.template, sampler=self._sampler, session=session)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def _models(self) -> Response:
        """List the model."""
        return _json(ModelList(data=[self._card]))

    async def _model(self, name: str) -> Response:
        """Describe the model."""
        self._check_model(name)
        return _json(self._card)

    async def _health(self) -> Response:
        """Report the health and load of each server."""
        health = await health_of(self._served.pool)
        return _json(health, status=200 if health.status == "ok" else 503)

    async def _metrics_text(self) -> Response:
        """Return metrics for Prometheus."""
        health = await health_of(self._served.pool)
        return Response(self.metrics.render(health.servers), media_type=CONTENT_TYPE)

    @property
    def _card(self) -> ModelCard:
        served = self._served
        return ModelCard(
            id=served.model,
            created=served.created,
            owned_by="agent-loop",
            max_model_len=served.max_model_len,
        )

    def _check_model(self, name: str) -> None:
        if name != self._served.model:
            raise UnknownModel(
                f"there is no model {name!r}; this server has {self._served.model!r}", param="model"
            )

    def _check_key(self, request: Request) -> None:
        key = self._served.api_key or ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(token.strip().encode(), key.encode()):
            raise HTTPException(
                401, "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            )


class UnknownModel(RequestError):
    """The request names a model that is not served."""


def _refuse_host(_: Request, message: str) -> Response:
    error = make_error(f"{message}; allow it with --allowed-host", status=MISDIRECTED)
    return error_json_response(error, status=MISDIRECTED)


def _json(response: ResponseModel, *, status: int = 200) -> Response:
    return Response(response.model_dump_json(), status_code=status, media_type="application/json")


async def _next_or_none(chunks: AsyncGenerator[ResponseModel]) -> ResponseModel | None:
    return await anext(chunks, None)


async def _on_unknown_model(_: Request, error: Exception) -> Response:
    response = make_error(str(error), status=404, param="model", code="model_not_found")
    return error_json_response(response, status=404)
