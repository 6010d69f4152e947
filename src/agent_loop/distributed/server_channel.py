"""Server's end of the channel to one client: ordered request batches, and responses as soon as there are some."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from agent_loop.distributed.messages import RequestBatch, Response
from agent_loop.distributed.throttle import Throttle

PendingExchange: TypeAlias = asyncio.Future[list[tuple[int, Response]]]
"""An exchange whose responses have not been sent yet."""


class ServerChannel:
    """Channel to one client, as the server sees it.

    Each exchange stays open until there are responses, and returns all of them, whichever batch had the requests.
    Exchanges carry many responses under load, and one response each otherwise.
    """

    def __init__(self, client: str, *, on_batch: Callable[[ServerChannel, RequestBatch], None]) -> None:
        """Create a channel.

        Args:
            client: Name of the client.
            on_batch: Called with the batches in the order in which the client sent them.
        """
        self.client = client
        self._on_batch = on_batch
        self._early: dict[int, tuple[RequestBatch, PendingExchange]] = {}
        """Batches that arrived before an earlier batch, by number."""
        self._num_accepted = 0
        self._open: dict[int, float] = {}
        """Event loop time at which each open request arrived, by call id."""
        self._exchanges: deque[PendingExchange] = deque()
        self._responses: list[tuple[int, Response]] = []
        self._throttle = Throttle(self._send_responses)

    @property
    def num_pending(self) -> int:
        """Number of exchanges that wait for responses."""
        return len(self._exchanges) + len(self._early)

    async def exchange(self, batch: RequestBatch) -> list[tuple[int, Response]]:
        """Accept a batch, and return call ids and responses once there are some, or none if no request is open."""
        exchange: PendingExchange = asyncio.get_running_loop().create_future()
        self._early[batch.number] = batch, exchange
        while (due := self._early.pop(self._num_accepted, None)) is not None:
            self._num_accepted += 1
            self._accept(*due)
        return await exchange

    def respond(self, call_id: int, response: Response) -> None:
        """Send a response to the client. Does nothing if the request is not open any more.

        Every request is ended once, by this method or by `give_up`.
        """
        arrived_at = self._open.pop(call_id, None)
        if arrived_at is None:
            return
        self._throttle.record_latency(asyncio.get_running_loop().time() - arrived_at)
        self._responses.append((call_id, response))
        self._throttle.request()

    def give_up(self, call_id: int) -> None:
        """End a request without a response, because the client cancelled the request."""
        self._open.pop(call_id, None)
        self._throttle.request()

    def close(self) -> None:
        """End all pending exchanges, because the client has left the channel."""
        self._exchanges += [exchange for _, exchange in self._early.values()]
        self._early.clear()
        self._open.clear()
        self._send_responses()

    def _accept(self, batch: RequestBatch, exchange: PendingExchange) -> None:
        now = asyncio.get_running_loop().time()
        self._open |= {request.call_id: now for request in batch.requests}
        self._on_batch(self, batch)
        if batch.is_urgent:
            self._exchanges.appendleft(exchange)
            self._end_exchange()
        else:
            self._exchanges.append(exchange)
        if self._responses or len(self._exchanges) > len(self._open):
            self._throttle.request()

    def _send_responses(self) -> None:
        """Send the responses with the oldest exchange, and end the exchanges that no open request needs."""
        if self._responses and self._exchanges:
            self._end_exchange()
        while len(self._exchanges) > len(self._open):
            self._end_exchange()

    def _end_exchange(self) -> None:
        exchange, responses = self._exchanges.popleft(), self._responses
        self._responses = []
        if not exchange.done():
            exchange.set_result(responses)
