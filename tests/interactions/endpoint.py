"""Endpoint with OpenAI's chat completions that returns prepared responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
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
    """Sends one prepared response after the other."""

    responses: Sequence[PreparedResponse]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    async def respond(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        response = self.responses[len(self.requests) - 1]
        if response.hangs:
            await asyncio.Event().wait()
        if response.body is not None:
            return web.Response(text=response.body, content_type="application/json")
        if response.status != 200:
            error = {"error": {"message": "broken"}}
            return web.json_response(error, status=response.status, headers={"retry-after-ms": "1"})
        message = {"role": "assistant", "content": response.text}

        usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "user"}
        return web.json_response({**completion, "choices": [choice], "usage": usage})


@asynccontextmanager
async def endpoint(*responses: PreparedResponse | str) -> AsyncGenerator[Endpoint]:
    """Serve the responses on a free port until exit."""
    served = Endpoint([PreparedResponse(each) if isinstance(each, str) else each for each in responses])
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    served.url = f"http://{host}:{port}/v1"
    try:
        yield served
    finally:
        await runner.cleanup()
