"""Judge with OpenAI's chat completions that a script answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from agent_loop.trajectory import AgentLoopOutput

Reply = str | int | None
"""Text of a completion, an error status, or None for no reply at all."""


@dataclass
class ScriptedJudge:
    """Judge at a local port. Its script returns a reply to the messages of a request."""

    script: Callable[[list[dict[str, Any]]], Reply]
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
            reply = self.script(body["messages"])
            if reply is None:
                await asyncio.Event().wait()
        finally:
            await self._count(-1)
        if isinstance(reply, int):
            error = {"error": {"message": "broken"}}
            return web.json_response(error, status=reply, headers={"retry-after-ms": "1"})
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(completion)


@asynccontextmanager
async def judging(script: Callable[[list[dict[str, Any]]], Reply]) -> AsyncGenerator[ScriptedJudge]:
    """Serve a judge on a free port until exit."""
    judge = ScriptedJudge(script)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.respond)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    judge.url = f"http://{host}:{port}/v1"
    try:
        yield judge
    finally:
        await runner.cleanup()


def flaky(
    script: Callable[[list[dict[str, Any]]], Reply], *, share: float, seed: int = 0
) -> Callable[[list[dict[str, Any]]], Reply]:
    """Return a script that replies to a random share of requests with an error status or with nonsense."""
    rng = random.Random(seed)

    def answer(messages: list[dict[str, Any]]) -> Reply:
        if rng.random() < share:
            return rng.choice([429, 500, 503, "I would say yes.", '{"answer": "maybe"}'])
        return script(messages)

    return answer


def answer(value: Any) -> str:
    return json.dumps({"answer": value})


def prompt_of(messages: list[dict[str, Any]]) -> str:
    return str(messages[-1]["content"])


def write_file(folder: Path, values: Mapping[str, Any]) -> str:
    """Write a reward file and return its path."""
    path = folder / "rubric.yaml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    return str(path)


@asynccontextmanager
async def judged_by(
    folder: Path, *scripts: Callable[[list[dict[str, Any]]], Reply], judge: Any = None, **settings: Any
) -> AsyncGenerator[tuple[str, list[ScriptedJudge]]]:
    """Serve a judge for each script, without retries unless `judge` says so, and write the reward file of them."""
    async with AsyncExitStack() as stack:
        judges = [await stack.enter_async_context(judging(script)) for script in scripts]
        shared = {"model": "m", "max_retries": 0, **(judge or {})}
        values = {"judges": [{"base_url": each.url, **shared} for each in judges], **settings}
        yield write_file(folder, values), judges


def output_saying(text: str, *, question: str = "What is 2 + 2?") -> AgentLoopOutput:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], messages=messages)
