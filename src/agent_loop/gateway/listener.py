"""One gateway application and one port per event loop, shared by all sessions of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from agent_loop.gateway.gateway import Gateway
from agent_loop.gateway.session import Session
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.threads import run_in_thread
from agent_loop.serving.process import listening

if TYPE_CHECKING:
    from fastapi import FastAPI

CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which a program reaches its session."""

    base_url: str
    """Base URL of the OpenAI API."""
    api_key: str
    app: FastAPI
    """Application, for clients in the same process that do not use the network."""

    @property
    def anthropic_base_url(self) -> str:
        """Base URL of the Anthropic Messages API, without `/v1`, which Anthropic clients add."""
        return self.base_url.removesuffix("/v1")


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
    app: FastAPI = field(init=False)
    url: str = ""
    num_leases: int = 0
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[str]:
        self.num_leases += 1
        try:
            await self._open()
            yield self.url
        finally:
            self.num_leases -= 1
            if not self.num_leases:
                await run_shielded(self._close_if_unused, timeout_s=CLOSE_TIMEOUT_S)

    async def _open(self) -> None:
        async with self.lock:
            if not self.url:
                # late: FastAPI takes most of a second, and programs are also checked without a gateway
                module = await run_in_thread(partial(import_module, "agent_loop.gateway.app"))
                self.app = module.create_gateway_app(self.gateway)
                self.url = await self.stack.enter_async_context(listening(self.app))

    async def _close_if_unused(self) -> None:
        async with self.lock:
            if not self.num_leases and self.url:
                self.url = ""
                await self.stack.aclose()


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _GatewayServer] = WeakKeyDictionary()
