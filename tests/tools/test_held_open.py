"""Context managers that are entered and exited in a separate task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from agent_loop.runtime.concurrency import HeldOpen
from agent_loop.testing import run_virtual


class Room:
    """Context manager that takes a second to enter and to exit, and may fail while it is open."""

    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault
        self.log: list[str] = []
        self.tasks: set[asyncio.Task[object] | None] = set()
        self.breaks = asyncio.Event()

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
        if self.fault == "leaving":
            raise OSError("the key broke")


def test_a_context_is_entered_and_exited_in_the_same_task() -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_an_error_on_enter_is_raised_and_close_then_does_nothing() -> None:
    async def main() -> None:
        held = HeldOpen(Room(fault="entering").opened())
        with pytest.raises(OSError, match="locked"):
            await held.open()
        assert held.is_closed
        await held.close()

    run_virtual(main())


def test_an_error_inside_ends_the_context_and_is_not_raised_again() -> None:
    async def main() -> None:
        held = HeldOpen(Room(fault="inside").opened())
        await held.open()
        await held.closed()
        assert held.is_closed
        await held.close()

    run_virtual(main())


@pytest.mark.parametrize("delay_s", [0.5, 1.5])
def test_a_cancelled_open_or_close_leaves_no_task(delay_s: float) -> None:
    async def main() -> None:
        room = Room()
        held = HeldOpen(room.opened())

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

    run_virtual(main())
