"""Checks the host names of requests to a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
ANY_HOST = ("0.0.0.0", "::")
MISDIRECTED = 421
"""The status of a request for another host."""

RefuseHost: TypeAlias = Callable[[Request, str], Response]
"""Builds the response to a request for another host, from the request and a message."""


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
        refuse: Builds the response to a refused request.
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str] | None, refuse: RefuseHost) -> None:
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
