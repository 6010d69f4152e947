"""What asyncio lacks: shielded cleanup, calls that are asked to stop before they are cut, threads that may hang, and
concurrent calls whose errors come out as they are.

The only module that starts bare tasks; each is over when the function that started it returns, but for
`await_or_leave`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar, cast

ResultT = TypeVar("ResultT")


async def run_together(calls: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Runs calls at once and returns their results in order.

    If one raises, the others are cancelled and its exception is raised as it is, not in a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise cast(BaseException, failures.exceptions[0]) from None
    return [task.result() for task in tasks]


async def run_shielded(function: Callable[[], Awaitable[ResultT]], *, timeout_s: float) -> ResultT:
    """Runs cleanup to its end even if the caller is cancelled meanwhile, but no longer than `timeout_s`.

    The cancellation is delivered afterwards.

    Raises:
        TimeoutError: It took longer.
    """

    async def bounded() -> ResultT:
        async with asyncio.timeout(timeout_s):
            return await function()

    task = asyncio.ensure_future(bounded())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                break
            cancelled = error
        except Exception:  # noqa: BLE001  (raised again below, by task.result())
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as lost
        raise cancelled
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


async def run_abortable(
    call: Coroutine[Any, Any, ResultT],
    *,
    abort: Callable[[], Awaitable[None]],
    keep_partial: Callable[[ResultT], object],
    grace_s: float,
) -> ResultT:
    """Awaits a call that, on cancellation, is first asked to end by itself.

    If the caller is cancelled, `abort` is awaited and the call gets `grace_s` to return what it has, which goes to
    `keep_partial`; then the cancellation is delivered. A call that does not return in time is cancelled.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):  # the cancellation counts more than a server that cannot abort
            await run_shielded(lambda: _abort_and_wait(task, abort), timeout_s=grace_s)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            keep_partial(task.result())
        raise
    return task.result()


async def await_or_leave(call: Coroutine[Any, Any, ResultT], *, patience_s: float) -> ResultT:
    """Awaits a call. If the caller is cancelled, the call is; one that then goes on for longer than `patience_s` is
    left behind, as nothing can end it."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=patience_s)
        raise
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


async def _abort_and_wait(task: asyncio.Future[Any], abort: Callable[[], Awaitable[None]]) -> None:
    await abort()
    await asyncio.wait({task})


async def run_in_thread(function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Runs a blocking function in a thread of its own.

    A pool would be used up by functions that hang; a daemon thread hangs alone and does not keep the process alive.
    Cancelling stops the waiting, not the function.
    """
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_OneThreadEach(), lambda: context.run(function, *args, **kwargs))


class OneThread(Executor):
    """Runs blocking functions one after the other in a thread of its own, for objects that must stay in one thread.

    One that hangs keeps those behind it waiting, and nothing else: the thread does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"agent-loop-{name}")
        self._thread.start()

    async def run(self, function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """The function's result. Cancelling stops the waiting, and a function that has not begun."""
        context, loop = contextvars.copy_context(), asyncio.get_running_loop()
        return await loop.run_in_executor(self, lambda: context.run(function, *args, **kwargs))

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        self._work.put(lambda: _fulfil(future, fn, *args, **kwargs))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Ends the thread after what it was given so far."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class _OneThreadEach(Executor):
    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        work = functools.partial(_fulfil, future, fn, *args, **kwargs)
        threading.Thread(target=work, daemon=True, name=f"agent-loop-{fn}").start()
        return future


def _fulfil(future: Future[ResultT], fn: Callable[..., ResultT], *args: Any, **kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except StopIteration as error:
        future.set_exception(RuntimeError(f"{fn} raised {error!r}, which no coroutine can pass on"))
    except BaseException as error:  # noqa: BLE001  (handed to whoever awaits the future)
        future.set_exception(error)
    else:
        future.set_result(result)
