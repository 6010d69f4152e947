"""What asyncio lacks: shielded cleanup, calls that are asked to stop before they are cut, and concurrent calls whose
errors come out as they are.

Each task is over when the function that started it returns, unless it was abandoned (`agent_loop.runtime.isolated_task`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Generic, TypeVar, cast

from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, IsolatedTask
from agent_loop.runtime.time_scope import TimeScope

ResultT = TypeVar("ResultT")

SHIELD_GRACE_S = 2 * ABANDON_GRACE_S
"""Seconds that shielded cleanup has to end after its time limit, the graces of the foreign code in it included."""


async def run_together(
    calls: Iterable[Coroutine[Any, Any, ResultT]], *, begin_at_once: int | None = None
) -> list[ResultT]:
    """Runs calls at once and returns their results in order.

    If one raises, the others are cancelled and its exception is raised as it is, not in a group.

    Args:
        calls: Are asked for one by one, as they begin.
        begin_at_once: After so many have begun, whatever else is ready goes on before the next ones do; None begins all
            before that.
    """
    tasks: list[asyncio.Task[ResultT]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                tasks.append(group.create_task(call))
                if begin_at_once is not None and len(tasks) % begin_at_once == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        raise cast(BaseException, failures.exceptions[0]) from None
    return [task.result() for task in tasks]


async def run_shielded(function: Callable[[], Awaitable[ResultT]], *, timeout_s: float) -> ResultT:
    """Run cleanup to its end even if the caller is cancelled meanwhile, but no longer than `timeout_s`.

    The cancellation is delivered afterwards. Cleanup that goes on for `SHIELD_GRACE_S` after its time limit is
    abandoned.

    Raises:
        TimeoutError: It took longer.
    """

    async def bounded() -> ResultT:
        with TimeScope(timeout_s=timeout_s):
            return await function()

    task = IsolatedTask(bounded, name=f"cleanup {getattr(function, '__qualname__', function)}")
    try:
        with TimeScope(timeout_s=timeout_s + SHIELD_GRACE_S):
            await task.ended
    except asyncio.CancelledError:
        await task.wait_shielded(timeout_s=timeout_s + SHIELD_GRACE_S, after="it began")
        raise
    except TimeoutError:
        await task.wait_shielded(timeout_s=0.0, after="its time limit")
        raise
    return task.result()


async def merged(streams: Iterable[AsyncGenerator[ResultT]]) -> AsyncGenerator[ResultT]:
    """Yields what several generators yield, as it comes.

    If one raises, its exception is raised. At the end, however it comes, all of them are closed.
    """
    streams = list(streams)
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    coming = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = coming.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                coming[asyncio.ensure_future(anext(stream))] = stream
                yield item
    finally:
        for task in coming:
            task.cancel()
        if coming:
            await asyncio.wait(coming)
        for task in coming:
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not report it as lost
        for stream in streams:
            await stream.aclose()


async def run_while(
    call: Coroutine[Any, Any, ResultT], *, condition: Coroutine[Any, Any, None]
) -> ResultT | None:
    """Awaits a call as long as a condition lasts; when the condition returns first, the call is cancelled and the
    result is None."""
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


class Cut(Exception):
    """A call was to stop before it began, or while it ran; nothing came of it."""


async def run_abortable(
    function: Callable[[], Coroutine[Any, Any, ResultT]],
    *,
    abort: Callable[[], Awaitable[None]],
    keep_partial: Callable[[ResultT], object],
    grace_s: float,
    signal: Signal | None = None,
) -> ResultT:
    """Awaits a call that is first asked to end by itself, where the caller is cancelled or the signal comes.

    To ask it, `abort` is awaited; the call then gets `grace_s` to return what it has. One that does not return in time
    is cancelled. If it was the caller that was cancelled, the result goes to `keep_partial` and the cancellation is
    delivered; if it was the signal, the result is returned.

    Raises:
        Cut: The signal had come before, or the call did not return in time.
    """
    if signal is not None and signal.is_set():
        raise Cut
    task = IsolatedTask(function, name="a completion")
    wake = partial(_resolve, task.ended)
    listener = None if signal is None else signal.listen(wake)
    try:
        try:
            await task.ended
        finally:
            if signal is not None:
                signal.leave(listener)
        if not task.has_ended:
            await _ask_to_end(task, abort, grace_s=grace_s)
    except BaseException:
        try:
            await _ask_to_end(task, abort, grace_s=grace_s)
        finally:
            if task.has_result:
                keep_partial(task.result())
        raise
    if task.was_cancelled or not task.has_ended:
        raise Cut
    return task.result()


@contextlib.asynccontextmanager
async def running_beside(call: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Runs a call, such as an endless watch, as long as the body lasts.

    If it raises, the body goes on, and its exception is raised at the end.
    """
    task = asyncio.ensure_future(call)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


class HeldOpen(Generic[ResultT]):
    """An async context manager that is entered and left in one task of its own, as those need whose cancel scopes
    belong to a task, while any other task opens, uses and closes what it gives.

    Single use: `open`, then `close`, also after an `open` that raised.
    """

    def __init__(self, context: contextlib.AbstractAsyncContextManager[ResultT]) -> None:
        self._context = context
        self._opened: asyncio.Future[ResultT] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> ResultT:
        """Enters the context and returns what it gives, or raises what it raises."""
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(self._opened))
        await asyncio.wait({self._task, self._opened}, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            self._task.result()
        return self._opened.result()

    @property
    def is_over(self) -> bool:
        """It was left, by `close` or because something in it broke."""
        return self._task is None or self._task.done()

    async def over(self) -> None:
        """Waits until it is left; raises nothing of what broke it."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Leaves the context, and waits for that; a cancellation cancels what is left of it.

        Raises:
            Exception: What leaving raised. What broke it before is not raised again.
        """
        if self._task is None:
            return
        was_over = self._task.done()
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
        if error is not None and not was_over:
            raise error

    async def _hold(self, opened: asyncio.Future[ResultT]) -> None:
        async with self._context as given:
            opened.set_result(given)
            await self._closing.wait()


async def run_until(call: Coroutine[Any, Any, Any], event: asyncio.Event) -> None:
    """Runs a call until it ends or the event is set; then it is cancelled, and has ended when this returns."""
    task, waiting = asyncio.ensure_future(call), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.wait({task, waiting})
    if not task.cancelled():
        task.result()


class Signal:
    """Callbacks for an `asyncio.Event`.

    A task waits for the event while there is a callback.
    """

    def __init__(self, event: asyncio.Event) -> None:
        self.is_set = event.is_set
        self._event = event
        self._callbacks: dict[object, Callable[[], object]] = {}
        self._task: asyncio.Task[None] | None = None

    def listen(self, callback: Callable[[], object]) -> object:
        """Add a callback for an event that is not set yet; return the argument of `leave`."""
        listener = object()
        self._callbacks[listener] = callback
        if self._task is None:
            self._task = asyncio.create_task(self._call_back())
        return listener

    def leave(self, listener: object) -> None:
        """Remove a callback."""
        self._callbacks.pop(listener, None)
        if not self._callbacks and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _call_back(self) -> None:
        await self._event.wait()
        for callback in list(self._callbacks.values()):
            callback()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _ask_to_end(
    task: IsolatedTask[Any], abort: Callable[[], Awaitable[None]], *, grace_s: float
) -> None:
    """Have a task end by itself, or by cancellation; abandon it if it does neither."""

    async def abort_and_wait() -> None:
        await abort()
        await task.wait()

    try:
        if not task.has_ended:
            with contextlib.suppress(Exception):  # a server that cannot abort is no reason to wait
                await run_shielded(abort_and_wait, timeout_s=grace_s)
    finally:
        if not task.has_ended:
            await task.stop(grace_s=SHIELD_GRACE_S)
