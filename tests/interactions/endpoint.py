"""Endpoint with OpenAI's chat completions that a script or prepared responses answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class PreparedResponse:
    """Response to one request."""

    text: str | None = ""
    status: int = 200
    hangs: bool = False
    body: str | None = None
    """Body to send instead of a completion."""


@dataclass
class Endpoint:
    """Endpoint at a local port. Its script returns the response to the messages of a request."""

    script: Callable[[list[dict[str, Any]]], PreparedResponse | str]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_running: int = 0
    max_running: int = 0
    connections: set[Any] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until_running(self, number: int) -> None:
        """Wait until this number of requests is in flight."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: self.num_running == number)

    async def _count(self, change: int) -> None:
        async with self.changed:
            self.num_running += change
            self.max_running = max(self.max_running, self.num_running)
            self.changed.notify_all()

    async def respond(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.connections.add(request.transport)
        await self._count(1)
        try:
            await asyncio.sleep(0)
            given = self.script(body["messages"])
            response = PreparedResponse(given) if isinstance(given, str) else given
            if response.hangs:
                await asyncio.Event().wait()
        finally:
            await self._count(-1)
        if response.body is not None:
            return web.Response(text=response.body, content_type="application/json")
        if response.status != 200:
            error = {"error": {"message": "broken"}}
            return web.json_response(error, status=response.status, headers={"retry-after-ms": "1"})
        message = {"role": "assistant", "content": response.text}
        usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response({**completion, "choices": [choice], "usage": usage})


@asynccontextmanager
async def serving(
    script: Callable[[list[dict[str, Any]]], PreparedResponse | str],
) -> AsyncGenerator[Endpoint]:
    """Serve a script on a free port until exit."""
    served = Endpoint(script)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.respond)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    served.url = f"http://{host}:{port}/v1"
    try:
        yield served
    finally:
        await runner.cleanup()


@asynccontextmanager
async def endpoint(*responses: PreparedResponse | str) -> AsyncGenerator[Endpoint]:
    """Serve the responses, one after the other."""
    left = iter(responses)
    async with serving(lambda _: next(left)) as served:
        yield served
