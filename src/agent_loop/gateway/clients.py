"""Clients in this process, which reach a session without the network."""

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
"""The limits of the trajectory end a request earlier."""


def http_client(app: FastAPI) -> Any:
    """An `httpx2.AsyncClient` that calls the application itself. What it streams arrives at the end.

    Raises:
        ConfigError: httpx2, which the OpenAI and Anthropic clients are made of, is not installed.
    """
    httpx2 = _needed("httpx2", by="openai")
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, timeout=REQUEST_TIMEOUT_S)


def openai_client(endpoint: Endpoint, **options: Any) -> openai.AsyncOpenAI:
    """The official OpenAI client of a session; close it with `async with`.

    Args:
        options: Of `openai.AsyncOpenAI`.

    Raises:
        ConfigError: It is not installed.
    """
    make = _needed("openai", by="openai").AsyncOpenAI
    return _client_of(endpoint, make, base_url=endpoint.base_url, options=options)


def anthropic_client(endpoint: Endpoint, **options: Any) -> anthropic.AsyncAnthropic:
    """The official Anthropic client of a session; close it with `async with`.

    Args:
        options: Of `anthropic.AsyncAnthropic`.

    Raises:
        ConfigError: It is not installed.
    """
    make = _needed("anthropic", by="anthropic").AsyncAnthropic
    return _client_of(endpoint, make, base_url=endpoint.anthropic_base_url, options=options)


def _client_of(
    endpoint: Endpoint, make: Callable[..., Any], *, base_url: str, options: Mapping[str, Any]
) -> Any:
    given = {"base_url": base_url, "api_key": endpoint.api_key, **options}
    return make(http_client=http_client(endpoint.app), **given)


def _needed(module: str, *, by: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"a client in this process needs: pip install {by}") from error
