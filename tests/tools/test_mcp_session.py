"""Sessions with misbehaving servers; `Client` replaces the SDK's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp import MCPError
from mcp.types import CallToolResult

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.tools.mcp.session import McpSession, McpSessions

CLOSED = -32000


def invalid_result() -> None:
    CallToolResult.model_validate({"content": "hi"})


def error(code: int, message: str) -> Callable[[], None]:
    def fail() -> None:
        raise MCPError(code, message)

    return fail


def against_its_schema() -> None:
    raise RuntimeError("Tool t has an output schema but did not return structured content")


class Client:
    """Client whose calls run a given function; `is_alive` states whether other requests get responses."""

    def __init__(self, answer: Callable[[], None], *, is_alive: bool = True) -> None:
        self._answer = answer
        self._is_alive = is_alive

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self._answer()

    async def list_tools(self) -> None:
        if not self._is_alive:
            raise MCPError(CLOSED, "Connection closed")


@pytest.mark.parametrize(
    ("answer", "is_alive", "kind", "message"),
    [
        (error(CLOSED, "the database is down"), True, ToolError, "rejected the call: the database is down"),
        (error(CLOSED, "Connection closed"), False, ToolUnavailable, "ended the session during the call"),
        (error(-32602, "Unknown tool"), True, ToolError, "rejected the call: Unknown tool"),
        (invalid_result, True, ToolError, "returned an invalid result: ValidationError"),
        (against_its_schema, True, ToolError, "returned an invalid result: RuntimeError: Tool t has"),
    ],
)
def test_errors_of_a_server_are_reported_to_the_model(
    answer: Callable[[], None], is_alive: bool, kind: type[ToolError], message: str
) -> None:
    @asynccontextmanager
    async def connection() -> AsyncGenerator[Client]:
        yield Client(answer, is_alive=is_alive)

    async def main() -> None:
        session = McpSession(connection, reconnects=0)
        await session.open()
        with pytest.raises(ToolError, match=message) as caught:
            await session.call("t", {})
        assert caught.type is kind
        with pytest.raises(kind, match=message if is_alive else "has ended the session"):
            await session.call("t", {})
        await session.close()

    asyncio.run(main())


def test_a_session_that_fails_to_close_is_removed_all_the_same() -> None:
    @asynccontextmanager
    async def connection() -> AsyncGenerator[Client]:
        yield Client(invalid_result)
        raise OSError("the pipe is broken")

    async def main() -> None:
        sessions = McpSessions(connection, is_shared=False, reconnects=0)
        await sessions.acquire("a-0")
        with pytest.raises(OSError, match="the pipe is broken"):
            await sessions.release("a-0")
        await sessions.release("a-0")
        assert vars(sessions)["_shared"] == {}

    asyncio.run(main())


def test_a_shared_session_is_opened_by_the_first_user_and_closed_by_the_last() -> None:
    log: list[str] = []
    faults = [OSError("not yet")]

    @asynccontextmanager
    async def connection() -> AsyncGenerator[Client]:
        await asyncio.sleep(0)
        if faults:
            raise faults.pop()
        log.append("open")
        yield Client(invalid_result)
        log.append("close")

    async def main() -> None:
        sessions = McpSessions(connection, is_shared=True, reconnects=0)
        with pytest.raises(ToolUnavailable, match="not yet"):
            await sessions.acquire("a-0")
        async with asyncio.TaskGroup() as group:
            joins = [group.create_task(sessions.acquire(f"{name}-0")) for name in "bcd"]
        assert len({join.result() for join in joins}) == 1
        for name in "abbc":
            await sessions.release(f"{name}-0")
        assert log == ["open"]
        await sessions.release("d-0")
        assert log == ["open", "close"]

    asyncio.run(main())
