"""Event loop of a command, which ends in bounded time even if user code does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agent_loop.runtime.isolated_task import abandon

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

EXIT_GRACE_S = 5.0
"""Seconds that tasks have to end once the command is done."""


def run_to_end(
    main: Coroutine[Any, Any, ResultT],
    *,
    grace_s: float = EXIT_GRACE_S,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> ResultT:
    """Run a coroutine as `asyncio.run` does, and return even if tasks of user code do not end.

    At the end, tasks that swallow their cancellation are abandoned after `grace_s`. (`asyncio.run` would wait for them
    without limit.) Ctrl-C cancels the coroutine and raises KeyboardInterrupt.
    """
    runner = asyncio.Runner(loop_factory=loop_factory)
    loop = runner.get_loop()
    try:
        return runner.run(main)
    finally:
        try:
            loop.run_until_complete(_end_tasks(grace_s))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _end_tasks(grace_s: float) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=grace_s)
    for task in others:
        if not task.done():
            code = getattr(task.get_coro(), "__qualname__", task.get_name())
            abandon(task, f"a task ({code}) still ran {grace_s:g} s after the end")
        elif not task.cancelled() and task.exception() is not None:
            logger.debug("a task raised at the end", exc_info=task.exception())
