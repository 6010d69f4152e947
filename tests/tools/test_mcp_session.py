"""Sessions with misbehaving servers, and the context managers that they enter and exit in a separate task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp import MCPError
from mcp.types import CallToolResult

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.runtime.concurrency import HeldOpen
from agent_loop.tools.mcp.session import McpSession, McpSessions

pytestmark = pytest.mark.virtual_time

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
    """Replacement of the SDK's client. `is_alive` states whether requests other than calls get responses."""

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
async def test_errors_of_a_server_are_reported_to_the_model(
    answer: Callable[[], None], is_alive: bool, kind: type[ToolError], message: str
) -> None:
    @asynccontextmanager
    async def connection() -> AsyncGenerator[Client]:
        yield Client(answer, is_alive=is_alive)

    session = McpSession(connection, reconnects=0)
    await session.open()
    for expected in (message, message if is_alive else "has ended the session"):
        with pytest.raises(ToolError, match=expected) as caught:
            await session.call("t", {})
        assert caught.type is kind
    await session.close()


async def test_a_session_that_fails_to_close_is_removed_all_the_same() -> None:
    @asynccontextmanager
    async def connection() -> AsyncGenerator[Client]:
        yield Client(invalid_result)
        raise OSError("the pipe is broken")

    sessions = McpSessions(connection, is_shared=False, reconnects=0)
    await sessions.acquire("a-0")
    with pytest.raises(OSError, match="the pipe is broken"):
        await sessions.release("a-0")
    await sessions.release("a-0")


async def test_a_shared_session_is_opened_by_the_first_user_and_closed_by_the_last() -> None:
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


class Room:
    """Context manager that takes a second to enter and to exit, and may fail while it is open."""

    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault
        self.log: list[str] = []
        self.tasks: set[asyncio.Task[object] | None] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[str]:
        self.tasks.add(asyncio.current_task())
        await asyncio.sleep(1)
        if self.fault == "entering":
            raise OSError("locked")
        async with asyncio.timeout(5 if self.fault == "inside" else None):
            try:
                self.log.append("open")
                yield "room"
            finally:
                self.tasks.add(asyncio.current_task())
                await asyncio.sleep(1)
                self.log.append("closed")


async def test_a_context_is_entered_and_exited_in_the_same_task() -> None:
    room = Room()
    held = HeldOpen(room.opened())
    assert await asyncio.create_task(held.open()) == "room"
    assert not held.is_closed
    await asyncio.create_task(held.close())
    assert held.is_closed
    assert room.log == ["open", "closed"]
    assert len(room.tasks) == 1
    await held.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_on_enter_is_raised_and_one_inside_ends_the_context() -> None:
    held = HeldOpen(Room(fault="entering").opened())
    with pytest.raises(OSError, match="locked"):
        await held.open()
    assert held.is_closed
    await held.close()
    held = HeldOpen(Room(fault="inside").opened())
    await held.open()
    await held.closed()
    assert held.is_closed
    await held.close()


@pytest.mark.parametrize("delay_s", [0.5, 1.5])
async def test_a_cancelled_open_or_close_leaves_no_task(delay_s: float) -> None:
    held = HeldOpen(Room().opened())

    async def use() -> None:
        try:
            await held.open()
        finally:
            await held.close()

    task = asyncio.create_task(use())
    await asyncio.sleep(delay_s)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
