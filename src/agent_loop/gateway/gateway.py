"""The sessions of a process, by id."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException

from agent_loop.gateway.session import Session

MAX_CLOSED = 16384
"""Number of closed session ids that are remembered, so that requests for them get a 410 instead of a 404."""


class Gateway:
    """Registry of the open sessions. Session ids and keys are random and unguessable."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncGenerator[None]:
        """Register a session, so that requests reach it. Remove the session on exit."""
        self._open[session.session_id] = session
        try:
            yield
        finally:
            del self._open[session.session_id]
            self._closed[session.session_id] = None
            if len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def get(self, session_id: str, *, key: str | None) -> Session:
        """Return the session with this id.

        Raises:
            HTTPException: 404 if the id is unknown, 410 if the session is closed, 401 if the key is wrong.
        """
        session = self._open.get(session_id)
        if session is None and session_id in self._closed:
            raise HTTPException(410, "this session is closed because its trajectory has ended")
        if session is None:
            raise HTTPException(404, "there is no such session; use the base URL that the program was given")
        if key is None or not secrets.compare_digest(key.encode(), session.api_key.encode()):
            raise HTTPException(
                401, "the API key is missing or wrong; use the key that came with the base URL"
            )
        return session
