"""How requests come in: bodies that are bounded and strictly JSON, and a count of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_loop.serving.metrics import Metrics

MAX_BODY_BYTES = 32 * 2**20
"""A long conversation with some images fits easily."""
BODY_TIMEOUT_S = 60.0
"""A client has this long to send the body of a request."""


class StrictRequest(Request):
    """A request whose JSON is what RFC 8259 allows: no NaN, no half surrogates, nothing nested without end."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


class StrictRoute(APIRoute):
    """A route that reads strict JSON, and checks who asks before it reads anything."""

    admit: Callable[[Request], None] | None = None
    """Raises an error if the client may not ask."""

    @classmethod
    def admitting(cls, admit: Callable[[Request], None] | None) -> type[StrictRoute]:
        """Return the class of routes that admit clients by this check; None admits all."""
        return cast(
            type[StrictRoute],
            type(cls.__name__, (cls,), {"admit": None if admit is None else staticmethod(admit)}),
        )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            if self.admit is not None:
                self.admit(request)
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class BodyLimiter:
    """Middleware: refuses bodies over a number of bytes, and bodies that take too long to arrive."""

    def __init__(
        self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ends_at = asyncio.get_running_loop().time() + self._timeout_s
        num_received, is_whole = 0, False

        async def receive_bounded() -> Message:
            nonlocal num_received, is_whole
            if is_whole:  # (what comes then is the end of the connection)
                return await receive()
            self._check(_announced_length(scope))
            message = await self._next(receive, ends_at=ends_at)
            num_received += len(message.get("body", b""))
            self._check(num_received)
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, receive_bounded, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes; send less at once")

    async def _next(self, receive: Receive, *, ends_at: float) -> Message:
        limit = asyncio.timeout_at(ends_at)
        try:
            async with limit:
                return await receive()
        except TimeoutError:
            if not limit.expired():
                raise
            raise HTTPException(
                408, f"the body did not arrive within {self._timeout_s:g} s; send it again"
            ) from None


def _announced_length(scope: Scope) -> int:
    """Return the length of the body by the request's head; 0 if the head does not say."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) < 20 else 0


class RequestCounter:
    """Middleware: counts requests and how long they took, by route."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        started = time.perf_counter()

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            # Only paths that exist: whoever asks for others must not fill the memory with their names.
            path = str(getattr(scope.get("route"), "path", "other"))
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.duration.labels(path).observe(time.perf_counter() - started)
