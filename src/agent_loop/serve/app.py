"""The HTTP application of `agent-loop serve`: the OpenAI and Anthropic APIs in front of a pool of servers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.serve.chat import chat_completion, count_prompt_tokens, stream_chat_completion
from agent_loop.serve.chat_replies import ChatCompletion, ChatCompletionChunk, ModelCard, TextCompletion
from agent_loop.serve.chat_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
)
from agent_loop.serve.errors import UnknownModel, exception_handlers, json_response, make_error, write_error
from agent_loop.serve.metrics import CONTENT_TYPE, MeteredSampler, Metrics, health_of
from agent_loop.serve.middleware import MISDIRECTED, BodyLimiter, HostGuard, RequestObserver
from agent_loop.serve.responses_requests import CallRecord
from agent_loop.serve.routes import ApiRoute, ModelApis, offered, openapi_route, read_json
from agent_loop.serve.sampling import Sampler
from agent_loop.serve.streams import ClientConnection, OpenAIWriter, stream_response
from agent_loop.serve.text import completion, score_prompts, stream_completion
from agent_loop.serve.wishes import Wishes
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.trajectory import Incident

SamplingRequestT = TypeVar("SamplingRequestT", bound=SamplingRequest)
MAX_SESSIONS = 4096
"""Maximum number of idle sessions that clients named."""


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

    def check_name(self, name: str) -> None:
        """Raise `UnknownModel` if a request names another model."""
        if name != self.model:
            message = f"there is no model {name!r}; this server has {self.model!r}"
            raise UnknownModel(message, param="model", code="model_not_found")


def create_app(served: ServedModel) -> Starlette:
    """Return an ASGI application that serves the OpenAI and Anthropic APIs from a pool of servers."""
    pool_app = _PoolApp(served)
    routes = pool_app.routes()
    app = Starlette(
        routes=[each.route() for each in [*routes, openapi_route("agent-loop", routes)]],
        exception_handlers=exception_handlers(offered=lambda: offered(routes)),
        middleware=[
            Middleware(RequestObserver, observe=pool_app.metrics.observe),
            Middleware(HostGuard, hosts=served.hosts, refuse=_refuse_host),
            Middleware(BodyLimiter),
        ],
    )
    app.state.stopping = pool_app.stopping
    return app


def _refuse_host(request: Request, message: str) -> Response:
    error = make_error(f"{message}; allow it with --allowed-host", status=MISDIRECTED)
    return write_error(request, error, status=MISDIRECTED)


class _PoolApp:
    """State that all requests share."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.stopping = asyncio.Event()
        self.metrics = Metrics()
        self.calls = CallRecord()
        self.sampler = MeteredSampler(served.pool, metrics=self.metrics, max_model_len=served.max_model_len)
        self.sessions = _SessionTable(self.sampler)

    def routes(self) -> list[ApiRoute]:
        return [
            *ModelApis(self._open, stopping=self.stopping).routes("/v1"),
            ApiRoute(
                "POST",
                "/v1/completions",
                self._complete_text,
                CompletionRequest,
                ("application/json", "text/event-stream"),
            ),
            ApiRoute("GET", "/health", self._health),
            ApiRoute("GET", "/metrics", self._metrics_text, kinds=("text/plain",)),
        ]

    def _open(self, request: Request) -> _PoolCompleter:
        """Check the API key and the session's name of a request."""
        if self.served.api_key is not None:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
            if not secrets.compare_digest(given.encode(), self.served.api_key.encode()):
                raise HTTPException(
                    401,
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY, or x-api-key: KEY",
                )
        session = request.headers.get("x-session-id")
        if session is not None and not 1 <= len(session) <= 256:
            raise RequestError("x-session-id: give between 1 and 256 characters", param="x-session-id")
        return _PoolCompleter(self, session)

    async def _complete_text(self, request: Request) -> Response:
        """Complete a text or token ids, or score them."""
        completer = self._open(request)
        body = CompletionRequest.read(await read_json(request))
        self.served.check_name(body.model)
        connection = ClientConnection(request.receive, self.stopping)
        if body.is_scored:
            scored = await connection.run(
                score_prompts(
                    body,
                    template=self.served.template,
                    manager=self.served.pool,
                    max_model_len=self.served.max_model_len,
                )
            )
            self.metrics.prompt_tokens.inc(scored["usage"].prompt_tokens)
            return json_response(scored)
        if body.stream:
            chunks = completer.stream_text(body)
            return await stream_response(chunks, connection=connection, writer=OpenAIWriter())
        return json_response(await connection.run(completer.complete_text(body)))

    async def _health(self, request: Request) -> Response:
        """Report the health and load of each server."""
        health = await health_of(self.served.pool)
        return json_response(health, status=200 if health.status == "ok" else 503)

    async def _metrics_text(self, request: Request) -> Response:
        """Return metrics for Prometheus."""
        health = await health_of(self.served.pool)
        return Response(self.metrics.render(health.servers), media_type=CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class _PoolCompleter:
    """Completes one request with the servers of a pool."""

    app: _PoolApp
    session: str | None
    """Value of the header `x-session-id`."""

    @property
    def template(self) -> ChatTemplate:
        return self.app.served.template

    @property
    def calls(self) -> CallRecord:
        return self.app.calls

    @property
    def wishes(self) -> Wishes:
        return Wishes(are_offered=False)

    def note(self, incident: Incident) -> None:
        pass

    async def complete(self, chat: ChatCompletionRequest) -> ChatCompletion:
        self._check(chat)
        with self._in_session(chat) as own:
            return await chat_completion(own, template=self.template, sampler=self.app.sampler)

    async def stream(self, chat: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk]:
        self._check(chat)
        with self._in_session(chat) as own:
            chunks = stream_chat_completion(own, template=self.template, sampler=self.app.sampler)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def complete_text(self, body: CompletionRequest) -> TextCompletion:
        with self._in_session(body) as own:
            return await completion(own, template=self.template, sampler=self.app.sampler)

    async def stream_text(self, body: CompletionRequest) -> AsyncGenerator[TextCompletion]:
        with self._in_session(body) as own:
            chunks = stream_completion(own, template=self.template, sampler=self.app.sampler)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def count_tokens(self, chat: ChatCompletionRequest) -> int:
        self.app.served.check_name(chat.model)
        return await count_prompt_tokens(chat, template=self.template)

    def model_card(self, name: str | None) -> ModelCard:
        served = self.app.served
        if name is not None:
            served.check_name(name)
        return ModelCard(
            id=served.model,
            created=served.created,
            owned_by="agent-loop",
            max_model_len=served.max_model_len,
        )

    @contextmanager
    def _in_session(self, body: SamplingRequestT) -> Generator[SamplingRequestT]:
        """Yield a request in the session that its client names."""
        with self.app.sessions.use(self.session or body.session_id) as session:
            yield body.model_copy(update={"session_id": session})

    def _check(self, chat: ChatCompletionRequest) -> None:
        served = self.app.served
        if chat.tools_in_use and served.why_no_tools:
            raise RequestError(f"tools: {served.why_no_tools}", param="tools")
        served.check_name(chat.model)


class _SessionTable:
    """Sessions named by clients. Requests of one session go to the same server, which has their prefix in its cache.

    The least recently used session is ended when there are too many.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._busy: set[str] = set()

    @contextmanager
    def use(self, name: str | None) -> Generator[str | None]:
        """Yield the session id of a name, and mark the session as busy until exit.

        Yields None if there is no name, or if another request is using the session. Such a request is sampled in its
        own session, because a session takes one request at a time.
        """
        if name is None or name in self._busy:
            yield None
            return
        self._idle.pop(name, None)
        self._busy.add(name)
        try:
            yield f"named-{name}"
        finally:
            self._busy.discard(name)
            self._idle[name] = None
            if len(self._idle) > MAX_SESSIONS:
                oldest, _ = self._idle.popitem(last=False)
                self._sampler.end_session(f"named-{oldest}")
