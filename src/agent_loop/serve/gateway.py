"""The gateway: an HTTP application that serves sessions, and one port per event loop for all of its sessions."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import AgentLoopError, ConfigError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.serve.chat_replies import ChatCompletion, ChatCompletionChunk, ModelCard
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.errors import exception_handlers, make_error, write_error
from agent_loop.serve.middleware import LOCAL_HOSTS, MISDIRECTED, BodyLimiter, HostGuard, RequestObserver
from agent_loop.serve.process import listening
from agent_loop.serve.responses_requests import CallRecord
from agent_loop.serve.routes import ModelApis, offered, openapi_route
from agent_loop.serve.session import Session
from agent_loop.serve.shared_completion import RetryInfo, SharedChoices
from agent_loop.serve.wishes import Wishes
from agent_loop.trajectory import Incident

if TYPE_CHECKING:
    import anthropic
    import openai

CLOSE_TIMEOUT_S = 30.0
MAX_CLOSED = 16384
"""Number of closed session ids that are remembered, so that requests for them get a 410 instead of a 404."""
MODEL_NAME = "agent-loop"
"""Model name that `/v1/models` lists. Requests may name any model; the model in training answers."""
CLAUDE_CODE = "claude-cli/"
"""Beginning of the user agent of Claude Code, which changes calls in its record of the conversation: it fills in
defaults of arguments, and removes white space at the ends of lines and `cd` to its own folder."""
REQUEST_TIMEOUT_S = 3600.0
"""Timeout of the HTTP client. The limits of the trajectory end a request earlier."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which a program reaches its session."""

    base_url: str
    """Base URL of the OpenAI API."""
    api_key: str
    app: Starlette
    """Application, for clients in the same process that do not use the network."""

    @property
    def anthropic_base_url(self) -> str:
        """Base URL of the Anthropic Messages API, without `/v1`, which Anthropic clients add."""
        return self.base_url.removesuffix("/v1")


class Gateway:
    """Registry of the open sessions. Session ids and keys are random and unguessable."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncGenerator[None]:
        """Register a session, so that requests reach it. Remove the session on exit."""
        self._open[session.session_id] = session
        try:
            yield
        finally:
            del self._open[session.session_id]
            self._closed[session.session_id] = None
            if len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def session_of(self, request: Request) -> Session:
        """Return the session of a request."""
        session_id = request.path_params["session_id"]
        session = self._open.get(session_id)
        if session is None and session_id in self._closed:
            raise HTTPException(410, "this session is closed because its trajectory has ended")
        if session is None:
            raise HTTPException(404, "there is no such session; use the base URL that the program was given")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not secrets.compare_digest(key.encode(), session.api_key.encode()):
            raise HTTPException(
                401, "the API key is missing or wrong; use the key that came with the base URL"
            )
        return session

    def note_refusal(self, request: Request, error: AgentLoopError) -> None:
        """Record a refused request as an incident of its session, if the session is open."""
        with suppress(HTTPException):
            self.session_of(request).note_failure(error)


def create_gateway_app(gateway: Gateway) -> Starlette:
    """Return an ASGI application that serves the sessions of a gateway."""
    stopping, created = asyncio.Event(), int(time.time())
    apis = ModelApis(
        lambda request: _SessionCompleter(gateway.session_of(request), request, created), stopping=stopping
    )
    routes = apis.routes("/sessions/{session_id}/v1")
    app = Starlette(
        routes=[each.route() for each in [*routes, openapi_route("agent-loop gateway", routes)]],
        exception_handlers=exception_handlers(
            offered=lambda: offered(routes), on_refused=gateway.note_refusal
        ),
        middleware=[
            Middleware(RequestObserver),
            Middleware(HostGuard, hosts=LOCAL_HOSTS, refuse=_refuse_host),
            Middleware(BodyLimiter),
        ],
    )
    app.state.stopping = stopping
    return app


def _refuse_host(request: Request, message: str) -> Response:
    return write_error(request, make_error(message, status=MISDIRECTED), status=MISDIRECTED)


class _SessionCompleter:
    """Completes one request as a turn of a session."""

    def __init__(self, session: Session, request: Request, created: int) -> None:
        self._session = session
        self._created = created
        self._incidents: list[Incident] = []
        self._trusts_call_ids = request.headers.get("user-agent", "").startswith(CLAUDE_CODE)
        num_retries = request.headers.get("x-stainless-retry-count", "")
        self._retry = RetryInfo(
            num_retries=int(num_retries) if num_retries.isdecimal() and len(num_retries) < 10 else 0,
            idempotency_key=request.headers.get("idempotency-key"),
        )

    @property
    def template(self) -> ChatTemplate:
        return self._session.template

    @property
    def calls(self) -> CallRecord:
        return self._session.calls

    @property
    def wishes(self) -> Wishes:
        return self._session.wishes

    def note(self, incident: Incident) -> None:
        self._incidents.append(incident)

    async def complete(self, chat: ChatCompletionRequest) -> ChatCompletion:
        return await self._submit(chat).whole(chat)

    def stream(self, chat: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk]:
        return self._submit(chat).stream(chat)

    async def count_tokens(self, chat: ChatCompletionRequest) -> int:
        return await self._session.count_tokens(chat, trusts_call_ids=self._trusts_call_ids)

    def model_card(self, name: str | None) -> ModelCard:
        return ModelCard(id=name or MODEL_NAME, created=self._created, owned_by="agent-loop")

    def _submit(self, chat: ChatCompletionRequest) -> SharedChoices:
        return self._session.submit(
            chat, retry=self._retry, incidents=self._incidents, trusts_call_ids=self._trusts_call_ids
        )


# -- the port ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def reachable(session: Session) -> AsyncGenerator[Endpoint]:
    """Serve a session over HTTP. The first session of an event loop opens the port, the last session closes it.

    Raises:
        ConfigError: No port is available.
    """
    loop = asyncio.get_running_loop()
    server = _servers.setdefault(loop, _GatewayServer())
    try:
        async with server.lease() as url, server.gateway.serving(session):
            yield Endpoint(f"{url}/sessions/{session.session_id}/v1", session.api_key, server.app)
    finally:
        if not server.num_leases:
            _servers.pop(loop, None)


@dataclass(eq=False, slots=True)
class _GatewayServer:
    """HTTP server of an event loop, open while at least one session uses it."""

    gateway: Gateway = field(default_factory=Gateway)
    app: Starlette = field(init=False)
    url: str = ""
    num_leases: int = 0
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[str]:
        self.num_leases += 1
        try:
            async with self.lock:
                if not self.url:
                    self.app = create_gateway_app(self.gateway)
                    self.url = await self.stack.enter_async_context(listening(self.app))
            yield self.url
        finally:
            self.num_leases -= 1
            if not self.num_leases:
                await run_shielded(self._close_if_unused, timeout_s=CLOSE_TIMEOUT_S)

    async def _close_if_unused(self) -> None:
        async with self.lock:
            if not self.num_leases and self.url:
                self.url = ""
                await self.stack.aclose()


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _GatewayServer] = WeakKeyDictionary()


# -- clients in the same process ---------------------------------------------------------------------------------------


def http_client(app: Starlette) -> Any:
    """Return an `httpx2.AsyncClient` that calls the application directly. All chunks of a stream arrive at its end."""
    httpx2 = _import_package("httpx2", package="openai")
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, timeout=REQUEST_TIMEOUT_S)


def openai_client(endpoint: Endpoint, **options: Any) -> openai.AsyncOpenAI:
    """Return the official OpenAI client for a session, with these options. Use it with `async with`, which closes it.

    Raises:
        ConfigError: The package `openai` is not installed.
    """
    make = _import_package("openai", package="openai").AsyncOpenAI
    return _client_of(endpoint, make, base_url=endpoint.base_url, options=options)


def anthropic_client(endpoint: Endpoint, **options: Any) -> anthropic.AsyncAnthropic:
    """Return the official Anthropic client for a session, as `openai_client`."""
    make = _import_package("anthropic", package="anthropic").AsyncAnthropic
    return _client_of(endpoint, make, base_url=endpoint.anthropic_base_url, options=options)


def _client_of(
    endpoint: Endpoint, make: Callable[..., Any], *, base_url: str, options: Mapping[str, Any]
) -> Any:
    given = {"base_url": base_url, "api_key": endpoint.api_key, **options}
    return make(http_client=http_client(endpoint.app), **given)


def _import_package(module: str, *, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"a client in this process needs: pip install {package}") from error
