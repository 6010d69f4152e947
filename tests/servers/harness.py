"""HTTP servers on a local port, which stand for the servers of engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def http_server(handler: Handler) -> AsyncGenerator[str]:
    """Serve all paths with a handler, and yield the URL."""

    async def respond(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", respond)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def events(request: web.Request, *lines: str) -> web.StreamResponse:
    """Return an event stream that was begun with these lines."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for line in lines:
        await response.write(line.encode())
    return response


async def broken_off(request: web.Request, *lines: str) -> web.StreamResponse:
    """Begin an event stream, and close the connection."""
    response = await events(request, *lines)
    assert request.transport is not None
    request.transport.abort()
    return response
