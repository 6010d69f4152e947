"""What every HTTP request passes: its host name, its id, the limits of its body, and the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 32 * 2**20
"""Maximum size of a request body. A long conversation with images fits."""
BODY_TIMEOUT_S = 60.0
"""Time that a client has to send the body of a request."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
ANY_HOST = ("0.0.0.0", "::")
MISDIRECTED = 421
"""The status of a request for another host."""


def answered_hosts(host: str, *, more: Sequence[str] = ()) -> frozenset[str] | None:
    """Return the host names that requests to a server may use; None allows any name.

    Args:
        host: Address that the server listens on.
        more: Additional names that the user allows. If the server listens on all addresses, only these and local
            names are allowed.
    """
    if host in ANY_HOST and not more:
        return None
    return frozenset({*LOCAL_HOSTS, *more} if host in ANY_HOST else {*LOCAL_HOSTS, host, *more})


class HostGuard:
    """Middleware that refuses requests for other host names, as a protection against DNS rebinding.

    A web page of another site can make its host name resolve to this machine and then read responses. Its requests
    carry the other site's host name.

    Args:
        app: The wrapped application.
        hosts: Allowed host names without ports; None allows any.
        refuse: Builds the response to a refused request, from the request and a message.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str] | None, refuse: Callable[[Request, str], Response]
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if (
            scope["type"] == "http"
            and self._hosts is not None
            and (host := _host_of(scope)) not in self._hosts
        ):
            app = self._refuse(Request(scope), f"nothing is served under the host name {host[:80]!r}")
        await app(scope, receive, send)


def _host_of(scope: Scope) -> str:
    """Return the host name of a request, without the port."""
    value = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
    return value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]


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


class RequestObserver:
    """Middleware that gives each request an id, which official clients show in their errors, and measures it.

    Args:
        app: The wrapped application.
        observe: Called at the end of each request with its path as it is declared, its status and its duration in
            seconds. Unknown paths share one name, so that clients cannot create an unbounded number of names.
    """

    def __init__(self, app: ASGIApp, *, observe: Callable[[str, int, float], None] | None = None) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status, started = 500, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._observe is not None:
                self._observe(state.get("route", "other"), status, time.perf_counter() - started)
