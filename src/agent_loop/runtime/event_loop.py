"""Event loop of a command, which ends in bounded time even if user code tries to stop or block it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from agent_loop.runtime.isolated_task import abandon

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

EXIT_GRACE_S = 5.0
"""Seconds that tasks and threads have to end once the command is done. The process ends without the others."""


def run_to_end(main: Coroutine[Any, Any, ResultT], *, grace_s: float = EXIT_GRACE_S) -> ResultT:
    """Run a coroutine as `asyncio.run` does, and return even if tasks or threads of user code do not end.

    Ctrl-C ends the event loop. SystemExit and KeyboardInterrupt of callbacks, and `loop.stop()`, do not. At the end,
    tasks that swallow their cancellation and hanging threads of the default executor are abandoned after `grace_s`.
    """
    with asyncio.Runner(loop_factory=lambda: _EventLoop(grace_s)) as runner:
        loop = runner.get_loop()
        try:
            return runner.run(main)
        finally:
            try:
                loop.run_until_complete(_end_tasks(grace_s))
            finally:
                for task in asyncio.all_tasks(loop):
                    code = getattr(task.get_coro(), "__qualname__", task.get_name())
                    abandon(task, f"a task ({code}) still ran {grace_s:g} s after the end")


def exit_process(code: Any) -> NoReturn:
    """End the process with this exit code, even if threads that `run_to_end` abandoned still run."""
    names = ", ".join(sorted(thread.name for thread in _HUNG if thread.is_alive()))
    if not names:
        sys.exit(code)
    logger.warning("threads of user code still run (%s); the process ends without them", names)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  (the interpreter would wait for the threads first)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class _EventLoop(asyncio.SelectorEventLoop):
    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self._grace_s = grace_s

    def run_until_complete(self, future: Any) -> Any:
        future = asyncio.ensure_future(future, loop=self)
        while True:
            try:
                return super().run_until_complete(future)
            except (SystemExit, KeyboardInterrupt) as error:
                if _is_ctrl_c(error) or (future.done() and not _has_result(future)):
                    raise
                if future.done():
                    return future.result()
                logger.warning("a callback or task raised %s, which was ignored", type(error).__name__)
            except RuntimeError:
                if future.done() or self.is_closed():
                    raise
                logger.warning("user code stopped the event loop; it was restarted")

    async def shutdown_default_executor(self, *args: Any) -> None:
        executor: Any = getattr(self, "_default_executor", None)
        if executor is None:
            return
        self._executor_shutdown_called = True
        executor.shutdown(wait=False)
        ends_at = self.time() + self._grace_s
        while running := [thread for thread in executor._threads if thread.is_alive()]:
            if self.time() >= ends_at:
                _HUNG.update(running)
                return
            await asyncio.sleep(min(0.02, self._grace_s))


async def _end_tasks(grace_s: float) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=grace_s)
    for task in others:
        if task.done() and not task.cancelled() and task.exception() is not None:
            logger.debug("a task raised at the end", exc_info=task.exception())


def _has_result(future: asyncio.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None


def _is_ctrl_c(error: BaseException) -> bool:
    """Return whether a handler of SIGINT raised the exception, as opposed to code that the event loop runs."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    traceback, name = error.__traceback__, ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_code.co_name, traceback.tb_next
    return name == "_on_sigint"  # (of asyncio.Runner)


_HUNG: set[threading.Thread] = set()
