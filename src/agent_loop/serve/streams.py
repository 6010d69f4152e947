"""Responses that are written in the format of an API, and aborted when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.runtime.concurrency import run_while
from agent_loop.serve.chat_replies import ReplyWriter
from agent_loop.serve.completions import ReplyChunk
from agent_loop.serve.errors import ErrorReply

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
        """Await a coroutine, and cancel it if the client disconnects or the application stops."""

        async def boxed() -> tuple[ResultT]:
            return (await call,)

        if (result := await run_while(boxed(), condition=self._ended())) is not None:
            return result[0]
        if self.stopping.is_set():
            raise ServerError("the server is stopping; send the request to another server")
        raise ClientDisconnected

    async def _ended(self) -> None:
        async def disconnected() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass

        await run_while(disconnected(), condition=self.stopping.wait())


async def reply(
    chunks: AsyncGenerator[ReplyChunk],
    *,
    connection: ClientConnection,
    writer: ReplyWriter,
    is_streamed: bool | None,
) -> Response:
    """Return the response with the completions of a request. A stream starts when the first chunk has arrived."""
    if is_streamed:
        first = await connection.run(_first(chunks))
        return _EventStream(first, chunks, connection=connection, writer=writer)
    return json_response(writer.whole(await connection.run(_all(chunks))))


async def _all(chunks: AsyncGenerator[ReplyChunk]) -> list[ReplyChunk]:
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


async def _first(chunks: AsyncGenerator[ReplyChunk]) -> ReplyChunk:
    try:
        return await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise


class _EventStream(Response):
    """Response of server-sent events.

    An error in the middle of the stream becomes the last event. The source is closed if the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: ReplyChunk,
        rest: AsyncGenerator[ReplyChunk],
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
                    await send(_body_message(self._writer.error(ErrorReply.of(error))))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_body_message(self._writer.chunk(self._first)))
        async for chunk in self._rest:
            await send(_body_message(self._writer.chunk(chunk)))
        await send(_body_message(self._writer.end()))


def _body_message(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def json_response(value: Mapping[str, Any], *, status: int = 200) -> Response:
    """Return a value as JSON."""
    body = to_json(value, inf_nan_mode="null")
    return Response(body, status_code=status, media_type="application/json")
