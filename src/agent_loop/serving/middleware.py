"""Limits on request bodies, strict JSON, and metrics of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, cast

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_loop.completions.fields import RequestModel
from agent_loop.serving.metrics import Metrics

MAX_BODY_BYTES = 32 * 2**20
"""Maximum size of a request body. A long conversation with images fits."""
BODY_TIMEOUT_S = 60.0
"""Time that a client has to send the body of a request."""


AmendBody: TypeAlias = Callable[[Request, type[RequestModel], Any], Any]
"""Called with a request, the model of its body, and the body, which does not match the model."""


class StrictRequest(Request):
    """Request whose body must be JSON as in RFC 8259: no NaN, no lone surrogates, bounded nesting."""

    amended: Any = None
    """Body that replaces the one that the client sent; None if none does."""

    async def json(self) -> Any:
        if self.amended is not None:
            return self.amended
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


class StrictRoute(APIRoute):
    """Route that reads strict JSON, and checks the client's credentials before it reads the body."""

    admit: Callable[[Request], None] | None = None
    """Raises an error if the client is not allowed to send the request."""
    amend: AmendBody | None = None
    """Returns the body without what cannot be honoured, or raises an error; None leaves bodies as they are."""

    @classmethod
    def admitting(
        cls, admit: Callable[[Request], None] | None, *, amend: AmendBody | None = None
    ) -> type[StrictRoute]:
        """Return a route class with this check; None admits all clients.

        Args:
            admit: See `StrictRoute.admit`.
            amend: See `StrictRoute.amend`.
        """
        hooks: dict[str, Any] = {"admit": admit, "amend": amend}
        fields = {name: hook if hook is None else staticmethod(hook) for name, hook in hooks.items()}
        return cast(type[StrictRoute], type(cls.__name__, (cls,), fields))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            if self.admit is not None:
                self.admit(request)
            strict = StrictRequest(request.scope, request.receive)
            try:
                return await handle(strict)
            except RequestValidationError as error:
                model = body_model(self)
                if self.amend is None or model is None or error.errors()[0]["loc"][0] != "body":
                    raise
                strict.amended = self.amend(strict, model, error.body)
            return await handle(strict)

        return handle_strictly


def body_model(route: Any) -> type[RequestModel] | None:
    """Return the model of the body that a route takes; None if it takes none."""
    field: Any = getattr(route, "body_field", None)
    model: Any = None if field is None else field.field_info.annotation
    return model if isinstance(model, type) and issubclass(model, RequestModel) else None


class BodyLimiter:
    """Middleware that refuses bodies that are too large or take too long to arrive."""

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
        num_received, is_complete = 0, False

        async def receive_bounded() -> Message:
            nonlocal num_received, is_complete
            if is_complete:  # the next message is the end of the connection
                return await receive()
            self._check(_content_length(scope))
            message = await self._next(receive, ends_at=ends_at)
            num_received += len(message.get("body", b""))
            self._check(num_received)
            is_complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_bounded, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(
                413, f"the body has more than {self._max_bytes} bytes; send a smaller request"
            )

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


def _content_length(scope: Scope) -> int:
    """Return the value of the header `content-length`; 0 if the header is missing or invalid."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) < 20 else 0


class RequestCounter:
    """Middleware that counts requests and measures their duration, by route."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        started = time.perf_counter()

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            # Unknown paths share one label, so that clients cannot create an unbounded number of labels.
            path = str(getattr(scope.get("route"), "path", "other"))
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.duration.labels(path).observe(time.perf_counter() - started)
