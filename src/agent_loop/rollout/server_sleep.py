"""Keep the servers awake while they are needed, where `rollout.free_cache_engine` puts them to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.manager import AsyncLLMServerManager

SLEEP_TIMEOUT_S = 30.0


class SleepingServers:
    """Wakes the servers for the first user, and puts them to sleep after the last.

    Args:
        server_manager: Client of the servers.
        free_cache_engine: Whether the servers sleep at all.
    """

    def __init__(self, server_manager: AsyncLLMServerManager, *, free_cache_engine: bool) -> None:
        self._server_manager = server_manager
        self._free_cache_engine = free_cache_engine
        self._lock = asyncio.Lock()
        self._num_users = 0

    @asynccontextmanager
    async def awake(self) -> AsyncGenerator[None]:
        """Keep the servers awake in the body."""
        if not self._free_cache_engine:
            yield
            return
        async with self._lock:
            if not self._num_users:
                await self._server_manager.wake_up()
            self._num_users += 1
        try:
            yield
        finally:
            await run_shielded(self._release, timeout_s=SLEEP_TIMEOUT_S)

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Watch the servers' health in the body."""
        return self._server_manager.watching()

    async def _release(self) -> None:
        async with self._lock:
            self._num_users -= 1
            if not self._num_users:
                await self._server_manager.sleep()
