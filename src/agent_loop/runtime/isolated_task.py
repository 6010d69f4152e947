"""Runs foreign code in a task of its own, and abandons a task that does not end when it is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

from agent_loop.runtime.incidents import IncidentCollector, record_incident
from agent_loop.runtime.time_scope import TimeScope
from agent_loop.trajectory.incidents import IncidentKind

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

ABANDON_GRACE_S = 5.0
"""Seconds that code has to end after it was cancelled. Its task is abandoned afterwards."""


class DeadlineExpired(Exception):
    """The time limit of a call passed. The message continues a sentence whose subject is the call."""


class Abandoned(DeadlineExpired):
    """The time limit of a call passed, and the call went on although it was cancelled. Its task was abandoned."""


class IsolatedTask(Generic[ResultT]):
    """A call to foreign code in a task of its own.

    Whatever the code raises becomes the outcome of the call and nothing else: `SystemExit` and `KeyboardInterrupt`
    do not reach the event loop. The code sees the caller's context variables, and what it sets is seen by the caller
    once the call has ended.

    Args:
        function: Is called and awaited in the task.
        name: What the log says if the task is abandoned.
    """

    __slots__ = ("_context", "_error", "_result", "_task", "ended", "name")

    def __init__(self, function: Callable[[], Awaitable[ResultT]], *, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.ended: asyncio.Future[None] = loop.create_future()
        """Is done once the call has ended. Cancelling a caller that awaits it does not cancel the call."""
        self._error: BaseException | None = None
        self._result: Any = None
        self._context = copy_context()
        self._task = asyncio.Task(self._run(function), loop=loop, name=name, context=self._context)

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    @property
    def was_cancelled(self) -> bool:
        """Whether the call ended with CancelledError."""
        return isinstance(self._error, asyncio.CancelledError)

    @property
    def has_result(self) -> bool:
        """Whether the call has ended and raised nothing."""
        return self._task.done() and self._error is None

    async def wait(self) -> None:
        """Wait until the call has ended."""
        await asyncio.wait({self._task})

    async def stop(self, *, grace_s: float = ABANDON_GRACE_S) -> bool:
        """Cancel the call and wait until it has ended; abandon it if it has not ended after `grace_s`.

        Returns:
            Whether it has ended.

        Raises:
            asyncio.CancelledError: The caller was cancelled meanwhile. It waited to the end all the same.
        """
        self._task.cancel()
        return await self.wait_shielded(timeout_s=grace_s, after="it was cancelled")

    async def wait_shielded(self, *, timeout_s: float, after: str) -> bool:
        """Wait until the call has ended, even if the caller is cancelled meanwhile; abandon it after `timeout_s`.

        Args:
            after: What the time counts from, for the log.

        Returns:
            Whether it has ended.

        Raises:
            asyncio.CancelledError: The caller was cancelled meanwhile. It waited to the end all the same.
        """
        ends_at = asyncio.get_running_loop().time() + timeout_s
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():
            scope = TimeScope(ends_at)
            try:
                with scope:
                    await asyncio.wait({self._task})
            except TimeoutError:
                break
            except asyncio.CancelledError as error:
                cancelled = error
                if scope.has_expired:
                    break
        has_ended = self._task.done()
        if not has_ended:
            abandon(self._task, f"{self.name} went on for {timeout_s:g} s after {after}")
        if cancelled is not None:
            raise cancelled
        return has_ended

    def result(self) -> ResultT:
        """Return what the call returned, or raise what it raised.

        Raises:
            RuntimeError: It raised CancelledError although nobody cancelled it, or what is not an `Exception`.
        """
        error = self._error
        try:
            if error is None:
                if copy_context() != self._context:  # (compares one pointer where no variable was set)
                    _adopt(self._context)
                return self._result
            if isinstance(error, asyncio.CancelledError):
                raise RuntimeError("it raised CancelledError although nobody cancelled it") from error
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise error
            raise RuntimeError(refusal_of(error)) from error
        finally:
            del error  # it holds this frame

    async def _run(self, function: Callable[[], Awaitable[ResultT]]) -> None:
        try:
            self._result = await function()
        except BaseException as error:  # noqa: BLE001  (the outcome of the call, for whoever waits for it)
            self._error = error
        finally:
            if not self.ended.done():
                self.ended.set_result(None)


def num_abandoned() -> int:
    """Return how many abandoned tasks still run in this process."""
    for task in [task for task in _ABANDONED if task.get_loop().is_closed()]:
        _ABANDONED.discard(task)
    return len(_ABANDONED)


def abandon(task: asyncio.Task[Any], what: str) -> None:
    """Leave a task to itself. `asyncio.run` does not wait for it.

    Args:
        what: What the task did, for the log and the trajectory, such as "tool 'search' went on for 5 s".
    """
    notes = IncidentCollector.current()
    logger.warning(
        "%s%s and was abandoned: its task runs on until it ends by itself; let CancelledError pass",
        "" if notes is None else f"{notes.owner}: ",
        what,
    )
    record_incident(IncidentKind.ABANDONED, f"{what} and was abandoned")
    num_abandoned()
    _ABANDONED.add(task)
    task.add_done_callback(_ABANDONED.discard)
    task.cancel()
    # `asyncio.run` cancels and awaits all tasks that are registered, for ever if one swallows its cancellation.
    asyncio._unregister_task(task)  # pyright: ignore  (documented under "Extending")
    task._log_destroy_pending = False  # pyright: ignore  (as asyncio itself sets it for tasks it leaves)


def _adopt(context: Context) -> None:
    """Set the variables that code in another context has set."""
    for variable, value in context.items():
        if variable.get(_UNSET) is not value:
            variable.set(value)


def refusal_of(error: BaseException) -> str:
    """Return the sentence about an exception that is not for foreign code to raise."""
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        return f"it raised {kind} to end the process"
    if isinstance(error, KeyboardInterrupt):
        return f"it raised {kind} although nobody pressed Ctrl-C"
    return f"it raised {kind}, which is not an ordinary error"


_UNSET = object()
_ABANDONED: set[asyncio.Task[Any]] = set()
"""Tasks that run on unheard. asyncio itself holds tasks weakly."""
