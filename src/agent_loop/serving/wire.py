"""How requests come in: bodies that are bounded and strictly JSON, and a count of each request."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_loop.serving.metrics import Metrics

MAX_BODY_BYTES = 32 * 2**20
"""A long conversation with some images fits easily."""


class StrictRequest(Request):
    """A request whose JSON is what RFC 8259 allows: no NaN, no half surrogates, nothing nested without end."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


class StrictRoute(APIRoute):
    """A route that reads strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class BoundBodies:
    """Middleware: refuses bodies over a number of bytes."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, f"the body has more than {self._max_bytes} bytes; send less at once")
            return message

        await self._app(scope, receive_bounded, send)


class CountRequests:
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
