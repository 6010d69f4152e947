"""Blocking functions in threads, called from the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeAlias, TypeVar

ResultT = TypeVar("ResultT")
Task: TypeAlias = Callable[[], None]


async def run_in_thread(function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Run a blocking function in a thread and return its result.

    The number of threads is not limited, so functions that hang block no others. They do not keep the process alive.
    Cancelling the caller stops waiting, but does not stop the function.
    """
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: context.run(function, *args, **kwargs))


class _DaemonThreads(Executor):
    """Executor with a new daemon thread for each function, so that a function that hangs blocks nothing."""

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        run = functools.partial(_run_into, future, fn, *args, **kwargs)
        threading.Thread(target=run, daemon=True, name="agent-loop-thread").start()
        return future


class OneThread(Executor):
    """Executor with a single thread, for objects that must be used from one thread. The first function starts it.

    A function that hangs blocks the functions after it. It does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"agent-loop-{name}")

    async def run(self, function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """Return the function's result. Cancelling the caller also cancels a function that has not started."""
        context, loop = contextvars.copy_context(), asyncio.get_running_loop()
        return await loop.run_in_executor(self, lambda: context.run(function, *args, **kwargs))

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await an async function on the event loop; run any other function in the thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self.run(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        if self._thread.ident is None:
            self._thread.start()
        self._tasks.put(lambda: _run_into(future, fn, *args, **kwargs))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the thread after the functions that were submitted before."""
        self._tasks.put(None)
        if wait and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _run_into(future: Future[ResultT], fn: Callable[..., ResultT], *args: Any, **kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except StopIteration as error:
        future.set_exception(RuntimeError(f"{fn} raised {error!r}, which a coroutine cannot raise"))
    except BaseException as error:  # noqa: BLE001  (raised to the caller who awaits the future)
        future.set_exception(error)
    else:
        future.set_result(result)


_THREADS = _DaemonThreads()
