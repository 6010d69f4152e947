"""User code in a task of its own. A task that does not end when it is cancelled is abandoned."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from agent_loop.runtime.incidents import IncidentCollector, record_incident
from agent_loop.trajectory.incidents import IncidentKind

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

ABANDON_GRACE_S = 5.0
"""Seconds that code has to end after its cancellation. Its task is abandoned afterwards."""


class DeadlineExpired(Exception):
    """The time limit of a call has passed. The message is a predicate; the call is its subject."""


class Abandoned(DeadlineExpired):
    """The time limit of a call has passed, and the call continued after its cancellation. Its task was abandoned."""


class IsolatedTask(Generic[ResultT]):
    """A call to user code in a task of its own.

    Every exception of the code becomes the result of the call: `SystemExit` and `KeyboardInterrupt` do not reach the
    event loop. The code sees the caller's context variables. The caller sees the variables that the code has set, once
    the call has ended.
    """

    def __init__(self, function: Callable[[], Awaitable[ResultT]], *, name: str) -> None:
        self.name = name
        self._error: BaseException | None = None
        self._result: Any = None
        self._context = copy_context()
        self._task = asyncio.create_task(self._run(function), name=name, context=self._context)

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

    async def wait(self, *, until: asyncio.Event | None = None) -> None:
        """Wait until the call has ended, or the event is set. Cancelling the caller does not cancel the call."""
        if until is None:
            await asyncio.wait({self._task})
            return
        stopped = asyncio.create_task(until.wait())
        try:
            await asyncio.wait({self._task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    async def stop(self, *, grace_s: float = ABANDON_GRACE_S) -> bool:
        """Cancel the call and wait until it has ended. Abandon the call if it still runs after `grace_s`."""
        self._task.cancel()
        return await self.wait_shielded(timeout_s=grace_s, after="it was cancelled")

    async def wait_shielded(self, *, timeout_s: float, after: str) -> bool:
        """Wait until the call has ended, even if the caller is cancelled. Abandon the call after `timeout_s`.

        Args:
            after: Event that the time counts from, for the log.
        """
        ends_at = asyncio.get_running_loop().time() + timeout_s
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():
            scope = asyncio.timeout_at(ends_at)
            try:
                async with scope:
                    await asyncio.wait({self._task})
            except TimeoutError:
                break
            except asyncio.CancelledError as error:
                cancelled = error
                if scope.expired():
                    break
        has_ended = self._task.done()
        if not has_ended:
            abandon(self._task, f"{self.name} still ran {timeout_s:g} s after {after}")
        if cancelled is not None:
            raise cancelled
        return has_ended

    def result(self) -> ResultT:
        """Return the result of the call, or raise its exception.

        Raises:
            RuntimeError: The call raised CancelledError although nobody cancelled it, or an object that is not an
                `Exception`.
        """
        error = self._error
        try:
            if error is None:
                for variable, value in self._context.items():
                    if variable.get(_UNSET) is not value:
                        variable.set(value)
                return self._result
            if isinstance(error, asyncio.CancelledError):
                raise RuntimeError("it raised CancelledError although nobody cancelled it") from error
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise error
            raise RuntimeError(f"it raised {type(error).__name__}, which is not an ordinary error") from error
        finally:
            del error  # it holds this frame

    async def _run(self, function: Callable[[], Awaitable[ResultT]]) -> None:
        try:
            self._result = await function()
        except BaseException as error:  # noqa: BLE001  (raised by `result`)
            self._error = error


def num_abandoned() -> int:
    """Return the number of abandoned tasks that still run on an open event loop."""
    return sum(not task.get_loop().is_closed() for task in _ABANDONED)


def abandon(task: asyncio.Task[Any], what: str) -> None:
    """Stop waiting for a task.

    Args:
        what: Behaviour of the task, for the log and the trajectory, such as "tool 'search' still ran 5 s after it was
            cancelled".
    """
    notes = IncidentCollector.current()
    logger.warning(
        "%s%s and was abandoned: its task continues until it ends by itself; do not catch CancelledError",
        "" if notes is None else f"{notes.owner}: ",
        what,
    )
    record_incident(IncidentKind.ABANDONED, f"{what} and was abandoned")
    _ABANDONED.add(task)
    task.add_done_callback(_ABANDONED.discard)
    task.cancel()


_UNSET = object()
_ABANDONED: set[asyncio.Task[Any]] = set()
"""Abandoned tasks that still run. asyncio itself holds only weak references to tasks."""
