"""Helpers around asyncio tasks: concurrent calls, shielded cleanup, and calls that can be aborted.

Each task is over when the function that started it returns, unless it was abandoned
(`agent_loop.runtime.isolated_task`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar, cast

from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, IsolatedTask

ResultT = TypeVar("ResultT")

SHIELD_GRACE_S = 2 * ABANDON_GRACE_S
"""Seconds that shielded cleanup has to end after its time limit, including the grace of user code in it."""


async def run_together(
    calls: Iterable[Coroutine[Any, Any, ResultT]], *, begin_at_once: int | None = None
) -> list[ResultT]:
    """Run calls concurrently and return their results in order.

    If a call raises, the others are cancelled, and its exception is raised by itself instead of in a group.

    Args:
        calls: The iterable is advanced as the calls start.
        begin_at_once: Number of calls to start before the event loop runs other tasks. None starts all calls first.
    """
    tasks: list[asyncio.Task[ResultT]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                tasks.append(group.create_task(call))
                if begin_at_once is not None and len(tasks) % begin_at_once == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        first = cast(BaseException, failures.exceptions[0])
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def run_shielded(function: Callable[[], Awaitable[ResultT]], *, timeout_s: float) -> ResultT:
    """Run cleanup for at most `timeout_s`, even if the caller is cancelled. The cancellation is raised afterwards.

    Cleanup that still runs `SHIELD_GRACE_S` after its time limit is abandoned.

    Raises:
        TimeoutError: The cleanup took longer.
    """

    async def bounded() -> ResultT:
        async with asyncio.timeout(timeout_s):
            return await function()

    task = IsolatedTask(bounded, name=f"cleanup {getattr(function, '__qualname__', function)}")
    if not await task.wait_shielded(timeout_s=timeout_s + SHIELD_GRACE_S, after="it began"):
        raise TimeoutError
    return task.result()


async def merged(streams: Iterable[AsyncGenerator[ResultT]]) -> AsyncGenerator[ResultT]:
    """Yield the items of several generators as they arrive.

    If a generator raises, its exception is raised. All generators are closed at the end, also after an exception.
    """
    streams = list(streams)
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    pending = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(stream))] = stream
                yield item
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        for task in pending:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it
        for stream in streams:
            await stream.aclose()


async def run_while(
    call: Coroutine[Any, Any, ResultT], *, condition: Coroutine[Any, Any, object]
) -> ResultT | None:
    """Await a call while a condition runs. If the condition returns first, cancel the call and return None."""
    task, ended = asyncio.ensure_future(call), asyncio.ensure_future(condition)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, ended):
            each.cancel()
        await asyncio.wait({task, ended})
        if not ended.cancelled():
            ended.exception()
    return None if task.cancelled() else task.result()


class CallAborted(Exception):
    """A call was aborted before it started, or while it ran, and has no result."""


async def run_abortable(
    function: Callable[[], Coroutine[Any, Any, ResultT]],
    *,
    abort: Callable[[], Awaitable[None]],
    keep_partial: Callable[[ResultT], object],
    grace_s: float,
    event: asyncio.Event | None = None,
) -> ResultT:
    """Await a call that is aborted, not cancelled, when the caller is cancelled or the event is set.

    To abort it, `abort` is awaited. The call then has `grace_s` to return a partial result, and is cancelled
    afterwards. If the caller was cancelled, the partial result is passed to `keep_partial` and the cancellation is
    raised. If the event was set, the partial result is returned.

    Raises:
        CallAborted: The event was set before, or the call did not return in time.
    """
    if event is not None and event.is_set():
        raise CallAborted
    task = IsolatedTask(function, name="a completion")
    try:
        await task.wait(until=event)
        if not task.has_ended:
            await _abort(task, abort, grace_s=grace_s)
    except BaseException:
        try:
            await _abort(task, abort, grace_s=grace_s)
        finally:
            if task.has_result:
                keep_partial(task.result())
        raise
    if task.was_cancelled or not task.has_ended:
        raise CallAborted
    return task.result()


@contextlib.asynccontextmanager
async def running_in_background(call: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run a call, such as an endless health check, while the body runs, and cancel it at the end.

    If the call raises, the body continues, and the exception is raised at the end.
    """
    task = asyncio.ensure_future(call)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


class BackgroundTasks:
    """Tasks that are started by code that cannot await them, such as a callback of the event loop.

    The tasks are kept until they end. The owner awaits `close` at its own end.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self._tasks)

    def start(self, call: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Run a call in a task. asyncio logs an exception of the call that nobody retrieves."""
        task = asyncio.create_task(call)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def wait(self) -> None:
        """Wait until the tasks that run have ended. Their exceptions are not raised."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel the tasks that run, in the order of their start, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class HeldOpen(Generic[ResultT]):
    """Runs an async context manager in a task of its own, so that any task can open, use and close it.

    Context managers with cancel scopes need this, because they have to be entered and exited in the same task. Single
    use: call `open` once, then `close`, even if `open` raised.
    """

    def __init__(self, context: contextlib.AbstractAsyncContextManager[ResultT]) -> None:
        self._context = context
        self._opened: asyncio.Future[ResultT] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> ResultT:
        """Enter the context and return its value. Exceptions of the context are raised."""
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(self._opened))
        await asyncio.wait({self._task, self._opened}, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            self._task.result()
        return self._opened.result()

    @property
    def is_closed(self) -> bool:
        """Whether the context was exited, by `close` or because of an error."""
        return self._task is None or self._task.done()

    async def closed(self) -> None:
        """Wait until the context is exited. Errors of the context are not raised."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Exit the context and wait until it is exited. A cancellation cancels the exit."""
        if self._task is None:
            return
        was_closed = self._task.done()
        self._closing.set()
        try:
            if self._opened is None or not self._opened.done():
                self._task.cancel()
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait({self._task})
            raise
        finally:
            error = self._task.exception() if self._task.done() and not self._task.cancelled() else None
        if error is not None and not was_closed:
            raise error

    async def _hold(self, opened: asyncio.Future[ResultT]) -> None:
        async with self._context as value:
            opened.set_result(value)
            await self._closing.wait()


async def _abort(task: IsolatedTask[Any], abort: Callable[[], Awaitable[None]], *, grace_s: float) -> None:
    """Abort a task, cancel it if it does not end, and abandon it if it still runs."""

    async def abort_and_wait() -> None:
        await abort()
        await task.wait()

    try:
        if not task.has_ended:
            with contextlib.suppress(Exception):  # a task that cannot be aborted is cancelled below
                await run_shielded(abort_and_wait, timeout_s=grace_s)
    finally:
        if not task.has_ended:
            await task.stop(grace_s=SHIELD_GRACE_S)
