"""Background tasks end with their owner."""

from __future__ import annotations

import asyncio

from agent_loop.runtime.concurrency import BackgroundTasks
from agent_loop.testing import run_virtual


def test_closing_cancels_the_tasks_and_waits_for_their_cleanup() -> None:
    cleaned_up: list[str] = []

    async def hang(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned_up.append(name)

    async def main() -> None:
        tasks = BackgroundTasks()
        tasks.start(hang("first"))
        tasks.start(hang("second"))
        await asyncio.sleep(1)
        assert len(tasks) == 2
        await tasks.close()
        assert (cleaned_up, len(tasks)) == (["first", "second"], 0)
        await tasks.close()

    run_virtual(main())
