"""Client's end of the channel to one server: few messages, each with everything there is to send."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from functools import partial

from agent_loop.distributed.messages import (
    ChannelLost,
    GenerationRequest,
    RequestBatch,
    Response,
    ResponseBatch,
)
from agent_loop.distributed.throttle import Throttle
from agent_loop.runtime.background_tasks import BackgroundTasks
from agent_loop.runtime.describe import describe_error

END_WITHIN_S = 0.1
"""Seconds that the end of a session waits for another message to travel with."""


class ClientChannel:
    """Channel to one server, as the client sees it. Sends requests, cancellations and ends of sessions.

    Each batch is an exchange: the server holds the exchange until the server has responses. The channel sends a batch
    when there is something to send, or when requests are open and the server holds no exchange.

    Args:
        open_channel: Opens a channel at the server, which closes the client's earlier channel. Returns the channel's
            name. Raises `ChannelLost`.
        exchange: Sends a packed batch, and returns a packed `ResponseBatch`. Raises `ChannelLost`.
        on_responses: Called with each batch of responses.
    """

    def __init__(
        self,
        *,
        open_channel: Callable[[], Awaitable[str]],
        exchange: Callable[[bytes], Awaitable[bytes]],
        on_responses: Callable[[ResponseBatch], None],
    ) -> None:
        self._open_channel = open_channel
        self._exchange = exchange
        self._on_responses = on_responses
        self._name = ""
        """Name of the open channel; empty if none is open."""
        self._is_opening = False
        self._opening = BackgroundTasks()
        self._exchanges = BackgroundTasks()
        self._num_sent = 0
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._unsent: dict[int, GenerationRequest] = {}
        self._cancelled: list[int] = []
        self._ended: list[str] = []
        self._end_timer: asyncio.TimerHandle | None = None
        self._throttle = Throttle(self._send_if_due)

    async def send(self, request: GenerationRequest) -> Response:
        """Send a request and return its response. Cancelling this call cancels the completion at the server.

        Raises:
            ChannelLost: The server will not respond.
        """
        loop = asyncio.get_running_loop()
        began_at, waiting = loop.time(), loop.create_future()
        self._waiting[request.call_id] = waiting
        self._unsent[request.call_id] = request
        self._throttle.request()
        try:
            response = await waiting
            self._throttle.record_latency(loop.time() - began_at)
            return response
        finally:
            del self._waiting[request.call_id]
            was_sent = self._unsent.pop(request.call_id, None) is None
            if was_sent and waiting.cancelled() and self._name:
                self._cancelled.append(request.call_id)
                self._throttle.request()

    def end_session(self, session: str) -> None:
        """Report to the server, with the next batch, that a session has ended."""
        if self._name:
            self._ended.append(session)
            if self._end_timer is None:
                loop = asyncio.get_running_loop()
                self._end_timer = loop.call_later(END_WITHIN_S, self._throttle.request)

    async def flush(self) -> None:
        """Wait until the server has processed the cancellations and the ends of sessions so far.

        Raises:
            ChannelLost: The server is gone, and its sessions with it.
        """
        if self._name:
            await asyncio.shield(self._send_batch(is_urgent=True))
            if not self._waiting:
                await self._exchanges.wait()

    async def close(self) -> None:
        """Fail all open requests with `ChannelLost`, and end all exchanges."""
        self._lose(ChannelLost("the client was closed"), is_reopened=False)
        await self._opening.close()
        await self._exchanges.close()

    def _send_if_due(self) -> None:
        if not self._name:
            if self._unsent and not self._is_opening:
                self._is_opening = True
                self._opening.start(self._open())
        elif self._unsent or self._cancelled or self._ended or (self._waiting and not self._exchanges):
            self._send_batch()

    async def _open(self) -> None:
        try:
            self._name, self._num_sent = await self._open_channel(), 0
        except Exception as error:  # noqa: BLE001  (raised by the requests that wait)
            self._lose(error, is_reopened=False)
        finally:
            self._is_opening = False
        self._throttle.request()

    def _send_batch(self, *, is_urgent: bool = False) -> asyncio.Task[None]:
        """Send everything there is to send."""
        requests = list(self._unsent.values())
        batch = RequestBatch(self._name, self._num_sent, requests, self._cancelled, self._ended, is_urgent)
        self._num_sent += 1
        self._unsent.clear()
        self._clear_sent()
        task = self._exchanges.start(self._run_exchange(self._name, pickle.dumps(batch, protocol=5)))
        task.add_done_callback(partial(self._after_exchange, self._name))
        return task

    async def _run_exchange(self, channel: str, packed: bytes) -> None:
        batch: ResponseBatch = pickle.loads(await self._exchange(packed))
        if channel == self._name:
            for call_id, response in batch.responses:
                waiting = self._waiting.get(call_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(response)
            self._on_responses(batch)

    def _after_exchange(self, channel: str, exchange: asyncio.Task[None]) -> None:
        error = None if exchange.cancelled() else exchange.exception()
        if channel == self._name:
            if error is not None:
                self._lose(error)
            self._throttle.request()

    def _lose(self, error: BaseException, *, is_reopened: bool = True) -> None:
        """Fail the open requests. Requests that were not sent yet open another channel if `is_reopened`."""
        self._name = ""
        self._clear_sent()
        if not is_reopened:
            self._unsent.clear()
        reason = str(error) if isinstance(error, ChannelLost) else describe_error(error)
        for call_id, waiting in self._waiting.items():
            if call_id not in self._unsent and not waiting.done():
                waiting.set_exception(ChannelLost(reason))

    def _clear_sent(self) -> None:
        self._cancelled, self._ended = [], []
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
