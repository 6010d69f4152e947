"""One application and one port per event loop, shared by all sessions on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from fastapi import FastAPI

from agent_loop.gateway.app import create_gateway_app
from agent_loop.gateway.gateway import Gateway
from agent_loop.gateway.session import Session
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.serving.process import listening

CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a program reaches its session."""

    base_url: str
    """Of the OpenAI dialect. The Messages dialect is found at the same without `/v1`, which its clients add."""
    api_key: str
    app: FastAPI
    """For clients in this process, which need no network."""

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")


@asynccontextmanager
async def reachable(session: Session) -> AsyncGenerator[Endpoint]:
    """Lets programs reach a session meanwhile. The first session of an event loop opens its port, the last one closes
    it.

    Raises:
        ConfigError: No port can be had.
    """
    loop = asyncio.get_running_loop()
    site = _sites.setdefault(loop, _GatewayServer())
    try:
        async with site.lease() as url, site.gateway.serving(session):
            yield Endpoint(f"{url}/sessions/{session.session_id}/v1", session.api_key, site.app)
    finally:
        if not site.num_leases:
            _sites.pop(loop, None)


@dataclass(eq=False, slots=True)
class _GatewayServer:
    """A port, open as long as somebody needs it."""

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
                self.app = create_gateway_app(self.gateway)
                self.url = await self.stack.enter_async_context(listening(self.app))

    async def _close_if_unused(self) -> None:
        async with self.lock:
            if not self.num_leases and self.url:
                self.url = ""
                await self.stack.aclose()


_sites: WeakKeyDictionary[asyncio.AbstractEventLoop, _GatewayServer] = WeakKeyDictionary()
