"""Requests in flight: at most one per session, and none is sent during a weight update."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from agent_loop.errors import ServerError


@dataclass(slots=True, eq=False)
class SGLangRequest:
    """Request in flight."""

    request_id: str
    rid: str = field(default_factory=lambda: uuid4().hex)
    """Id of the request in the engine. All ids have one length, because SGLang aborts all requests whose ids start with
    a given id."""
    is_sent: bool = False
    is_known: bool = False
    """Whether the engine has sampled a token of it."""
    is_aborted: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class SGLangRequests:
    """Registry of the requests in flight."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._by_session: dict[str, SGLangRequest] = {}
        self._may_send = asyncio.Event()
        self._may_send.set()

    def __len__(self) -> int:
        return len(self._by_session)

    def get(self, request_id: str) -> SGLangRequest | None:
        return self._by_session.get(request_id)

    @property
    def all(self) -> list[SGLangRequest]:
        return list(self._by_session.values())

    @property
    def num_sent(self) -> int:
        return sum(running.is_sent for running in self._by_session.values())

    @contextmanager
    def enter(self, request_id: str) -> Generator[SGLangRequest]:
        """Register a request while the body runs."""
        if request_id in self._by_session:
            raise ServerError(
                "a request of this session is already running; await or abort it first",
                server=self._server,
                request_id=request_id,
            )
        running = self._by_session[request_id] = SGLangRequest(request_id)
        try:
            yield running
        finally:
            del self._by_session[request_id]
            running.is_over.set()

    async def send(self, running: SGLangRequest) -> bool:
        """Wait until the request may be sent. Return False if it was aborted before."""
        await self._may_send.wait()
        running.is_sent = not running.is_aborted
        return running.is_sent

    @contextmanager
    def hold(self) -> Generator[None]:
        """Pause sending while the body runs."""
        self._may_send.clear()
        try:
            yield
        finally:
            self._may_send.set()
