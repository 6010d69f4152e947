"""HTTP application of the viewer. It never changes the run and loads nothing from other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_loop.errors import DataError
from agent_loop.runtime.describe import one_line
from agent_loop.serving.hosts import MISDIRECTED, HostGuard
from agent_loop.viewer.forks import Forks, fork_routes
from agent_loop.viewer.page import FIRST_PAGE, first_page, media_type, static_files
from agent_loop.viewer.plain_json import encode_json
from agent_loop.viewer.source import RunSource

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_TEXT = 500
"""Most characters of a search text."""
MAX_DIGITS = 18
"""Most digits of a number in a query, so that the number fits into 64 bits."""
MAX_MESSAGE = 300
"""Most characters of an error message."""


def create_viewer_app(
    source: RunSource, *, hosts: Iterable[str] | None, forks: Forks | None = None
) -> Starlette:
    """Return an ASGI application that shows a run.

    Args:
        source: Data of the run.
        hosts: Host names that requests may use, so that pages of other sites cannot reach the viewer. None allows all.
        forks: What-if forks that the page may start; None is no forks.
    """
    forks = forks or Forks(source, server=None, host="")
    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/static/{name}", _static),
            *(Route(f"/api/{name}", _make_endpoint(handler, source)) for name, handler in HANDLERS.items()),
            *fork_routes(forks),
        ],
        middleware=[
            Middleware(HeadersMiddleware),
            Middleware(HostGuard, hosts=hosts, refuse=_refuse_host),
        ],
        exception_handlers={HTTPException: _on_http_error},
    )
    app.state.stopping = asyncio.Event()
    return app


class HeadersMiddleware:
    """Middleware that adds `HEADERS` to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _refuse_host(_: Request, message: str) -> Response:
    return _error(message, status=MISDIRECTED)


def _page(_: Request) -> Response:
    return Response(first_page(), media_type=media_type(FIRST_PAGE))


def _static(request: Request) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    text = static_files().get(name)
    if text is None:
        raise HTTPException(404, "there is no such file")
    return Response(text, media_type=media_type(name))


def _state(source: RunSource, _: Request) -> Any:
    return source.state()


def _config(source: RunSource, _: Request) -> Any:
    return source.config()


def _metrics(source: RunSource, request: Request) -> Any:
    return source.metrics(request.query_params.get("cursor", ""))


def _table(source: RunSource, request: Request) -> Any:
    return source.table(_file_numbers(request))


def _trajectory(source: RunSource, request: Request) -> Any:
    split, step = _split_and_step(request)
    return source.trajectory(split=split, step=step, trajectory_id=request.query_params.get("id", ""))


def _timeline(source: RunSource, request: Request) -> Any:
    split, step = _split_and_step(request)
    return source.timeline(split=split, step=step)


def _search(source: RunSource, request: Request) -> Any:
    text = request.query_params.get("text", "")
    if not 0 < len(text) <= MAX_TEXT:
        raise HTTPException(400, f"text has {len(text)} characters; give 1 to {MAX_TEXT}")
    return source.search(text, _file_numbers(request))


HANDLERS: dict[str, Callable[[RunSource, Request], Any]] = {
    "state": _state,
    "config": _config,
    "metrics": _metrics,
    "table": _table,
    "trajectory": _trajectory,
    "timeline": _timeline,
    "search": _search,
}
"""Functions that return the data of a request, by the last part of the request's path."""


def _make_endpoint(
    handler: Callable[[RunSource, Request], Any], source: RunSource
) -> Callable[[Request], Response]:
    """Return the endpoint of a handler. It is synchronous, so that Starlette runs it in a thread while it reads
    files."""

    def endpoint(request: Request) -> Response:
        try:
            reply = handler(source, request)
        except DataError as error:
            raise HTTPException(404, one_line(str(error), max_length=MAX_MESSAGE)) from error
        if isinstance(reply, bytes):
            return Response(reply, media_type="application/octet-stream")
        return Response(encode_json(reply), media_type="application/json")

    return endpoint


def _split_and_step(request: Request) -> tuple[str, int]:
    split, step = request.query_params.get("split", ""), request.query_params.get("step", "")
    number = _parse_number(step)
    if not split or number is None:
        raise HTTPException(
            400, f"split is {split[:80]!r} and step is {step[:80]!r}; give a name and a number"
        )
    return split, number


def _file_numbers(request: Request) -> list[int]:
    given = request.query_params.get("files", "")
    numbers = [_parse_number(part) for part in given.split(",")]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        raise HTTPException(400, f"files is {given[:80]!r}; give numbers, with commas between them")
    return known


def _parse_number(text: str) -> int | None:
    """Return the integer that a text holds; None if it is not an integer or has more than `MAX_DIGITS` digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.detail, status=error.status_code)


def _error(message: str, *, status: int) -> Response:
    return Response(encode_json({"error": message}), status_code=status, media_type="application/json")
