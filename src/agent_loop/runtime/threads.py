"""Blocking functions in threads, beside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeAlias, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Work: TypeAlias = Callable[[], None]

IDLE_S = 10.0
"""How long a thread waits for the next function before it ends."""


async def run_in_thread(function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Runs a blocking function in a thread that no other one waits for.

    A pool of so many threads would be used up by functions that hang; here one that hangs hangs alone, and does not
    keep the process alive. Cancelling stops the waiting, not the function.
    """
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: context.run(function, *args, **kwargs))


def run_in_threads(
    function: Callable[[ItemT], ResultT], items: Iterable[ItemT], *, num_threads: int
) -> Iterator[ResultT]:
    """What a blocking function gives for each item, in their order; so many calls run at once.

    If one raises, or the caller stops asking, those that run end first.
    """
    running: deque[Future[ResultT]] = deque()
    try:
        for item in items:
            if len(running) == num_threads:
                yield running.popleft().result()
            running.append(_THREADS.submit(function, item))
        while running:
            yield running.popleft().result()
    finally:
        wait(running)


def num_idle_threads() -> int:
    """Threads of `run_in_thread` that wait for a function to run."""
    return _THREADS.num_idle


class _AsManyAsNeeded(Executor):
    """A thread for each function that runs; those that are done wait a while for another one."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        work = functools.partial(_fulfil, future, fn, *args, **kwargs)
        with self._lock:
            mailbox = self._idle.pop() if self._idle else None
        if mailbox is None:
            # A thread's arguments live as long as the thread, so the work is not among them.
            mailbox = queue.SimpleQueue[Work]()
            threading.Thread(target=self._run, args=(mailbox,), daemon=True, name="agent-loop-thread").start()
        mailbox.put(work)
        return future

    def _begin(self) -> None:
        """Without threads, as in a process that was forked."""
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work]] = []

    def _run(self, mailbox: queue.SimpleQueue[Work]) -> None:
        due = [mailbox.get()]
        while due:
            due.pop()()  # nothing of it is held while the thread waits for more
            due = self._next(mailbox)

    def _next(self, mailbox: queue.SimpleQueue[Work]) -> list[Work]:
        """One, or none if the thread is to end."""
        with self._lock:
            self._idle.append(mailbox)
        try:
            return [mailbox.get(timeout=IDLE_S)]
        except queue.Empty:
            with self._lock:
                if mailbox in self._idle:
                    self._idle.remove(mailbox)
                    return []
            return [mailbox.get()]  # it is on its way


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


_THREADS = _AsManyAsNeeded()
