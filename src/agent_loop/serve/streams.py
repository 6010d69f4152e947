"""Responses that are written in the format of an API, and aborted when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.runtime.concurrency import run_while
from agent_loop.serve.chat_replies import ErrorResponse, ResponseModel
from agent_loop.serve.errors import ClientDisconnected, error_response_of

ResultT = TypeVar("ResultT")


class ReplyWriter(Protocol):
    """Writes the reply to one request in the format of its API, either whole or as server-sent events."""

    def whole(self, completion: Any, /) -> ResponseModel | Mapping[str, Any]:
        """Return the reply with a whole completion."""
        ...

    def chunk(self, chunk: Any, /) -> bytes:
        """Return the events of a chunk of a completion."""
        ...

    def error(self, error: ErrorResponse, /) -> bytes:
        """Return the last event of a stream that failed."""
        ...

    def end(self) -> bytes:
        """Return the last events of a stream."""
        ...


class OpenAIWriter:
    """Writes chat and text completions as they are."""

    def whole(self, completion: ResponseModel) -> ResponseModel:
        return completion

    def chunk(self, chunk: ResponseModel) -> bytes:
        return f"data: {chunk.model_dump_json()}\n\n".encode()

    def error(self, error: ErrorResponse) -> bytes:
        return self.chunk(error)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


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


async def stream_response(
    chunks: AsyncGenerator[ResponseModel],
    *,
    connection: ClientConnection,
    writer: ReplyWriter,
) -> Response:
    """Wait for the first chunk and return the response that streams all chunks."""

    async def first_or_none() -> ResponseModel | None:
        return await anext(chunks, None)

    try:
        first = await connection.run(first_or_none())
    except BaseException:
        await chunks.aclose()
        raise
    return _EventStream(first, chunks, connection=connection, writer=writer)


class _EventStream(Response):
    """Response of server-sent events.

    An error in the middle of the stream becomes the last event. The source is closed if the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: ResponseModel | None,
        rest: AsyncGenerator[ResponseModel],
        *,
        connection: ClientConnection,
        writer: ReplyWriter,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._connection = connection
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            with suppress(ClientDisconnected):
                try:
                    await self._connection.run(self._send(send))
                except AgentLoopError as error:
                    await send(_body_message(self._writer.error(error_response_of(error))))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._first is not None:
            await send(_body_message(self._writer.chunk(self._first)))
        async for chunk in self._rest:
            await send(_body_message(self._writer.chunk(chunk)))
        await send(_body_message(self._writer.end()))


def _body_message(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
