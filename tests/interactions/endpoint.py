"""An endpoint with OpenAI's chat completions that says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Says:
    """One answer."""

    text: str | None = ""
    status: int = 200
    hangs: bool = False
    is_cut: bool = False
    body: str | None = None
    """Instead of a completion."""


@dataclass
class Endpoint:
    """Answers each request with the next of its answers."""

    answers: Sequence[Says]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        says = self.answers[len(self.requests) - 1]
        if says.hangs:
            await asyncio.Event().wait()
        if says.body is not None:
            return web.Response(text=says.body, content_type="application/json")
        if says.status != 200:
            error = {"error": {"message": "out of order"}}
            return web.json_response(error, status=says.status, headers={"retry-after-ms": "1"})
        message = {"role": "assistant", "content": says.text}
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "user",
                "choices": [
                    {"index": 0, "message": message, "finish_reason": "length" if says.is_cut else "stop"}
                ],
                "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16},
            }
        )


@asynccontextmanager
async def endpoint(*answers: Says | str) -> AsyncGenerator[Endpoint]:
    """Listens on a free port meanwhile."""
    served = Endpoint([Says(answer) if isinstance(answer, str) else answer for answer in answers])
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
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
