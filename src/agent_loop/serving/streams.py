"""HTTP responses that are aborted when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agent_loop.completions.response_models import ErrorResponse, ResponseModel
from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.runtime.concurrency import run_while
from agent_loop.serving.errors import error_response_of

ResultT = TypeVar("ResultT")


class ClientDisconnected(Exception):
    """The client disconnected before it got a response."""


@dataclass(frozen=True, slots=True)
class ClientConnection:
    """Connection of one request, which ends when the client disconnects or the application stops."""

    receive: Receive
    """ASGI receive function of a request whose body has been read."""
    stopping: asyncio.Event
    """Set when the application aborts in-flight requests to stop."""

    async def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Await a coroutine, and cancel it if the client disconnects or the application stops.

        Raises:
            ClientDisconnected: The client disconnected.
            ServerError: The application is stopping.
        """
        results: list[ResultT] = []

        async def work() -> bool:
            results.append(await call)
            return True

        if await run_while(work(), condition=self._wait_for_end()) is not None:
            return results[0]
        if self.stopping.is_set():
            raise ServerError("the server is stopping; send the request to another server")
        raise ClientDisconnected

    async def _wait_for_end(self) -> None:
        await run_while(self._wait_for_disconnect(), condition=self._wait_for_stop())

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _wait_for_stop(self) -> None:
        await self.stopping.wait()


def _done_event() -> bytes:
    return b"data: [DONE]\n\n"


def _event(chunk: ResponseModel) -> bytes:
    return f"data: {chunk.model_dump_json()}\n\n".encode()


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How the chunks of a stream are written as server-sent events. The default is the OpenAI API's format."""

    write: Callable[[ResponseModel], bytes] = _event
    """Encodes a chunk."""
    write_error: Callable[[ErrorResponse], bytes] = _event
    """Encodes an error, which ends the stream."""
    end: Callable[[], bytes] = _done_event
    """Encodes the last event of a stream without errors."""


OPENAI_EVENTS = EventFormat()


async def stream_response(
    chunks: AsyncGenerator[ResponseModel],
    *,
    connection: ClientConnection,
    events: EventFormat = OPENAI_EVENTS,
) -> Response:
    """Wait for the first chunk and return the response that streams all chunks.

    Raises:
        AgentLoopError: The stream failed before its first chunk, so that the error gets its own HTTP status.
        ClientDisconnected: The client disconnected before the first chunk.
    """
    try:
        first = await connection.run(_next_or_none(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks, connection=connection, events=events)


def json_response(response: ResponseModel, *, status: int = 200) -> Response:
    """Return a response model as JSON."""
    return Response(response.model_dump_json(), status_code=status, media_type="application/json")


async def _next_or_none(chunks: AsyncGenerator[ResponseModel]) -> ResponseModel | None:
    return await anext(chunks, None)


class EventStream(Response):
    """Response of server-sent events.

    An error in the middle of the stream becomes the last event. The source is closed if the client disconnects.

    Args:
        first: First chunk. The caller has awaited it, so that an early error still gets its own HTTP status.
        rest: The remaining chunks.
        connection: Connection of the client.
        events: Format of the events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: ResponseModel | None,
        rest: AsyncGenerator[ResponseModel],
        *,
        connection: ClientConnection,
        events: EventFormat,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._connection = connection
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            with suppress(ClientDisconnected):
                try:
                    await self._connection.run(self._send(send))
                except AgentLoopError as error:
                    await send(_body_message(self._events.write_error(error_response_of(error))))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._first is not None:
            await send(_body_message(self._events.write(self._first)))
        async for chunk in self._rest:
            await send(_body_message(self._events.write(chunk)))
        await send(_body_message(self._events.end()))


def _body_message(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
