"""A place on a server: what a request holds while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agent_loop.errors import ServerDied, ServerTimeout
from agent_loop.servers.base import AsyncServerBase
from agent_loop.types import TokenChunk
from agent_loop.waits import WaitKind, waiting_for

ResultT = TypeVar("ResultT")


class Place:
    """A place on a server, while it lasts."""

    def __init__(
        self,
        server: AsyncServerBase,
        *,
        request_id: str,
        num_known_tokens: int,
        ends_at: float | None,
        timeout_s: float | None,
    ) -> None:
        self.server = server
        self.num_known_tokens = num_known_tokens
        """Of the prompt, those that the server has computed or sampled before."""
        self.chunks: Sequence[TokenChunk] | None = None
        """The completion, once it is there."""
        self._request_id = request_id
        self._ends_at = ends_at
        self._timeout_s = timeout_s or 0.0
        self._scope: asyncio.Timeout | None = None
        self._loss: ServerDied | None = None

    async def run(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Awaits a call to the server until the request's time is over or the server is lost.

        Raises:
            ServerTimeout: The time is over.
            ServerDied: The server was given up.
        """
        if self._loss is not None:
            raise self._loss
        scope = self._scope = asyncio.timeout_at(self._ends_at)
        try:
            with waiting_for(WaitKind.COMPLETION, f"of {self.server.name}"):
                async with scope:
                    return await call()
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._loss or ServerTimeout(
                f"the completion took longer than {self._timeout_s:g} s; raise rollout.request_timeout_s, or see what "
                "holds the server up",
                server=self.server.name,
                request_id=self._request_id,
            ) from None
        finally:
            self._scope = None

    def lose(self, reason: str) -> None:
        """Has the running call fail."""
        self._loss = ServerDied(reason, server=self.server.name, request_id=self._request_id)
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
