"""The completions that run: at most one per session, none sent while the engine takes weights."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from agent_loop.errors import ServerError


def _new_rid() -> str:
    """SGLang aborts all requests whose ids begin with the given one: all have one length."""
    return uuid4().hex


@dataclass(slots=True, eq=False)
class Running:
    """One completion."""

    request_id: str
    rid: str = field(default_factory=_new_rid)
    """The engine's name for it."""
    is_sent: bool = False
    is_aborted: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class RunningRequests:
    """Admits completions."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._by_session: dict[str, Running] = {}
        self._may_send = asyncio.Event()
        self._may_send.set()
        self.num_holds = 0
        """How often sending was held up."""

    def __len__(self) -> int:
        return len(self._by_session)

    def get(self, request_id: str) -> Running | None:
        return self._by_session.get(request_id)

    @property
    def all(self) -> list[Running]:
        return list(self._by_session.values())

    @property
    def num_sent(self) -> int:
        return sum(running.is_sent for running in self._by_session.values())

    @contextmanager
    def enter(self, request_id: str) -> Generator[Running]:
        """Counts a completion while the context is open.

        Raises:
            ServerError: One of this session runs already.
        """
        if request_id in self._by_session:
            raise ServerError(
                "a request of this session is already running; await or abort it first",
                server=self._server,
                request_id=request_id,
            )
        running = self._by_session[request_id] = Running(request_id)
        try:
            yield running
        finally:
            del self._by_session[request_id]
            running.is_over.set()

    async def send(self, running: Running) -> bool:
        """Waits until it may be sent; False if it was aborted before."""
        await self._may_send.wait()
        running.is_sent = not running.is_aborted
        return running.is_sent

    @contextmanager
    def hold(self) -> Generator[None]:
        """Sends nothing while the context is open."""
        self.num_holds += 1
        self._may_send.clear()
        try:
            yield
        finally:
            self._may_send.set()
