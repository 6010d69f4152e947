"""Middleware of every HTTP request: the check of its host name, its id, and the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str] | None, refuse: Callable[[Request, str], Response]
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and self._hosts is not None:
            value = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            host = value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]
            if host not in self._hosts:
                app = self._refuse(Request(scope), f"nothing is served under the host name {host[:80]!r}")
        await app(scope, receive, send)


class RequestObserver:
    """Middleware that gives each request an id, which official clients show in their errors, and measures it.

    Unknown paths are observed under one name, so that clients cannot create an unbounded number of names.
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
