"""The gateway: an HTTP application in front of one session, and clients for it."""

from __future__ import annotations

import importlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ConfigError
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.completions import ReplyChunk
from agent_loop.serve.process import listening
from agent_loop.serve.responses_requests import CallRecord
from agent_loop.serve.routes import check_api_key, model_app
from agent_loop.serve.session import Session
from agent_loop.serve.shared_completion import RetryInfo
from agent_loop.serve.wishes import Wishes
from agent_loop.trajectory import Incident

if TYPE_CHECKING:
    import anthropic
    import openai

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


@asynccontextmanager
async def reachable(session: Session) -> AsyncGenerator[Endpoint]:
    """Serve a session over HTTP on a port of its own, on the loopback interface, until exit."""
    app = create_session_app(session)
    async with listening(app) as url:
        yield Endpoint(f"{url}/v1", session.api_key, app)


def create_session_app(session: Session) -> Starlette:
    """Return an ASGI application that serves one session."""

    def open_completer(request: Request) -> _SessionCompleter:
        check_api_key(request, session.api_key)
        return _SessionCompleter(session, request)

    return model_app(open_completer, hosts=None, on_refused=session.note_failure)


class _SessionCompleter:
    """Completes one request as a turn of a session."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
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

    def sample(self, chat: ChatCompletionRequest) -> AsyncGenerator[ReplyChunk]:
        return self._session.submit(
            chat, retry=self._retry, incidents=self._incidents, trusts_call_ids=self._trusts_call_ids
        )

    async def count_tokens(self, chat: ChatCompletionRequest) -> int:
        return await self._session.count_tokens(chat)

    def model_card(self, name: str | None) -> Mapping[str, Any]:
        created = int(time.time())
        return {"id": name or MODEL_NAME, "object": "model", "created": created, "owned_by": "agent-loop"}


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
