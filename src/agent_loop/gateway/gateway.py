"""The sessions of a process, by id."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException

from agent_loop.gateway.session import Session

MAX_CLOSED = 16384
"""Of so many sessions that ended, clients are told so."""


class Gateway:
    """Knows which sessions are open. Ids and keys are random: who has them was given them."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncGenerator[None]:
        """Lets requests reach a session meanwhile."""
        self._open[session.session_id] = session
        try:
            yield
        finally:
            del self._open[session.session_id]
            self._closed[session.session_id] = None
            if len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def get(self, session_id: str, *, key: str | None) -> Session:
        """The session of that id.

        Raises:
            HTTPException: 404, there never was one; 410, it is closed; 401, the key is not its own.
        """
        session = self._open.get(session_id)
        if session is None and session_id in self._closed:
            raise HTTPException(410, "this session is closed: the trajectory that it belonged to has ended")
        if session is None:
            raise HTTPException(404, "there is no such session; use the base URL as it was given")
        if key is None or not secrets.compare_digest(key.encode(), session.api_key.encode()):
            raise HTTPException(
                401, "the API key is missing or not this session's; use the one that came with the base URL"
            )
        return session
