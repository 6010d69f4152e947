"""Answers that end when the client hangs up."""

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
    """The client hung up before it was answered."""


@dataclass(frozen=True, slots=True)
class ClientConnection:
    """What ends a request before its answer does."""

    receive: Receive
    """Of a request whose body has been read."""
    stopping: asyncio.Event
    """The application is to stop, and waits for nothing any more."""

    async def hold(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Awaits a call, and cancels it if the client hangs up or the application stops.

        Raises:
            ClientDisconnected: The client hung up.
            ServerError: The application stops.
        """
        results: list[ResultT] = []

        async def work() -> bool:
            results.append(await call)
            return True

        if await run_while(work(), condition=self._ends()) is not None:
            return results[0]
        if self.stopping.is_set():
            raise ServerError("the server is being stopped; send the request to another one")
        raise ClientDisconnected

    async def _ends(self) -> None:
        await run_while(self._client_goes(), condition=self._stops())

    async def _client_goes(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _stops(self) -> None:
        await self.stopping.wait()


def _done() -> bytes:
    return b"data: [DONE]\n\n"


def _event(reply: ResponseModel) -> bytes:
    return f"data: {reply.model_dump_json()}\n\n".encode()


class EventStream(Response):
    """Server-sent events. An error in the middle becomes the last event; a client that hangs up ends the source.

    Args:
        first: The first reply, which the caller has awaited, so that an early error still has a status of its own.
        rest: The others.
        connection: The client's.
        write: Writes an event.
        write_error: Writes the event of an error.
        end: Writes what comes last, if all goes well.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: ResponseModel | None,
        rest: AsyncGenerator[ResponseModel],
        *,
        connection: ClientConnection,
        write: Callable[[ResponseModel], bytes] = _event,
        write_error: Callable[[ErrorResponse], bytes] = _event,
        end: Callable[[], bytes] = _done,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._connection = connection
        self._write = write
        self._write_error = write_error
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            with suppress(ClientDisconnected):
                try:
                    await self._connection.hold(self._send(send))
                except AgentLoopError as error:
                    await send(_part(self._write_error(error_response_of(error))))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._first is not None:
            await send(_part(self._write(self._first)))
        async for reply in self._rest:
            await send(_part(self._write(reply)))
        await send(_part(self._end()))


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
