"""The gateway: an HTTP application in front of one session, and clients for it."""

from __future__ import annotations

import importlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request

from agent_loop.errors import ConfigError
from agent_loop.serve.process import listening
from agent_loop.serve.routes import Completer, check_api_key, model_app, model_card
from agent_loop.serve.session import Session
from agent_loop.serve.shared_completion import RetryInfo
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

    def open_completer(request: Request) -> Completer:
        check_api_key(request, session.api_key)
        num_retries = request.headers.get("x-stainless-retry-count", "")
        retry = RetryInfo(
            num_retries=int(num_retries) if num_retries.isdecimal() and len(num_retries) < 10 else 0,
            idempotency_key=request.headers.get("idempotency-key"),
        )
        incidents: list[Incident] = []
        sample = partial(
            session.submit,
            retry=retry,
            incidents=incidents,
            trusts_call_ids=request.headers.get("user-agent", "").startswith(CLAUDE_CODE),
        )
        return Completer(
            session.template,
            session.calls,
            sample,
            session.count_tokens,
            lambda name: model_card(name or MODEL_NAME, created=int(time.time())),
            session.wishes,
            incidents,
        )

    return model_app(open_completer, hosts=None, on_refused=session.note_failure)


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
