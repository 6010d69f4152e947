"""Sessions of tools, and a web server for tools that send HTTP requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from agent_loop.tools.base import BaseTool
from agent_loop.tools.results import ToolResult
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall

CONFIG = ToolSessionConfig(timeout_s=60, close_timeout_s=10)


def tool_schema(name: str, /, *required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a tool. A property is a type or a JSON schema."""
    types = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in properties.items()}
    parameters = {"type": "object", "properties": types, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def session_of(*tools: BaseTool, **tools_kwargs: Any) -> ToolSession:
    return ToolSession({tool.name: tool for tool in tools}, config=CONFIG, tools_kwargs=tools_kwargs)


def kind_of(result: ToolResult) -> IncidentKind | None:
    return None if result.incident is None else result.incident.kind


async def execute(tool: BaseTool, /, **arguments: Any) -> ToolResult:
    """Call a tool once, in a trajectory of its own."""
    [result] = await execute_each([tool], ToolCall(tool.name, arguments))
    return result


async def execute_each(tools: list[BaseTool], *calls: ToolCall) -> list[ToolResult]:
    """Execute the calls of one trajectory one after the other, and check that it leaves nothing."""
    session = session_of(*tools)
    try:
        return [await session.execute(call) for call in calls]
    finally:
        assert await session.close() == []
        assert session.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}


@contextmanager
def serving(*routes: web.RouteDef) -> Iterator[str]:
    """Serve the routes on a free port while the body runs, and yield the URL."""
    app = web.Application()
    app.add_routes(routes)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
