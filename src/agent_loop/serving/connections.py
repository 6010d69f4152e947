"""HTTP connections that are closed if the client does not send a request in time."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

REQUEST_HEAD_TIMEOUT_S = 20.0
"""Time that a client has to send the head of a request, from its connection or from its first byte."""


class BoundedConnection(H11Protocol):
    """Uvicorn connection that is closed if the head of a request takes too long to arrive."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()

    def _limit_wait(self) -> None:
        """Start the timer if a request is awaited. Further bytes of the same head do not restart it."""
        if not self._awaits_request:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_HEAD_TIMEOUT_S, self._end_wait)

    def _end_wait(self) -> None:
        self._timer = None
        if self._awaits_request and not self.transport.is_closing():
            self.transport.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _awaits_request(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # (None until the first request)
        return cycle is None or cycle.response_complete
