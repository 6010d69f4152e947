"""API clients that call a session in the same process, without the network."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agent_loop.errors import ConfigError

if TYPE_CHECKING:
    import anthropic
    import openai
    from fastapi import FastAPI

    from agent_loop.gateway.listener import Endpoint

REQUEST_TIMEOUT_S = 3600.0
"""Timeout of the HTTP client. The limits of the trajectory end a request earlier."""


def http_client(app: FastAPI) -> Any:
    """Return an `httpx2.AsyncClient` that calls the application directly. All chunks of a stream arrive at its end.

    Raises:
        ConfigError: httpx2, a dependency of the OpenAI and Anthropic clients, is not installed.
    """
    httpx2 = _import_package("httpx2", package="openai")
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, timeout=REQUEST_TIMEOUT_S)


def openai_client(endpoint: Endpoint, **options: Any) -> openai.AsyncOpenAI:
    """Return the official OpenAI client for a session. Use it with `async with`, which closes it.

    Args:
        endpoint: The session's endpoint.
        options: Options of `openai.AsyncOpenAI`.

    Raises:
        ConfigError: The package `openai` is not installed.
    """
    make = _import_package("openai", package="openai").AsyncOpenAI
    return _client_of(endpoint, make, base_url=endpoint.base_url, options=options)


def anthropic_client(endpoint: Endpoint, **options: Any) -> anthropic.AsyncAnthropic:
    """Return the official Anthropic client for a session. Use it with `async with`, which closes it.

    Args:
        endpoint: The session's endpoint.
        options: Options of `anthropic.AsyncAnthropic`.

    Raises:
        ConfigError: The package `anthropic` is not installed.
    """
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
