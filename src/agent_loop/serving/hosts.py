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
"""Writes the answer to a request for another host: the request, what is wrong."""


def answered_hosts(host: str, *, more: Sequence[str] = ()) -> frozenset[str] | None:
    """Return the host names that a server listening at `host` answers to; None means any name.

    Args:
        host: The address at which it listens.
        more: Names that the user allows. With these, a server that listens everywhere answers to no others.
    """
    if host in ANY_HOST and not more:
        return None
    return frozenset({*LOCAL_HOSTS, *more} if host in ANY_HOST else {*LOCAL_HOSTS, host, *more})


class HostGuard:
    """Middleware: refuses requests for other hosts than these.

    A page of another site can have its own name resolve to this machine and then read what is answered under it. Its
    requests name that site as their host.

    Args:
        app: The application behind it.
        hosts: Names without ports; None allows any.
        refuse: Writes the answer to others.
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
