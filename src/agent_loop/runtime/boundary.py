"""The edge to code of the user's: bounded in time, its faults told from a cancellation, what it opened closed once."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from functools import partial
from numbers import Real
from typing import Any, TypeVar, cast

from agent_loop.errors import ConfigError, EpisodeError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.foreign_values import safe_repr, safe_str, type_name
from agent_loop.runtime.identifiers import new_id
from agent_loop.runtime.own_task import ABANDON_GRACE_S, Abandoned, DeadlineExpired, OwnTask
from agent_loop.runtime.threads import run_in_thread
from agent_loop.runtime.time_scope import TimeScope
from agent_loop.runtime.waits import WaitKind, waiting_for
from agent_loop.trajectory import Incident, IncidentKind

ResultT = TypeVar("ResultT")
MAX_REWARD = 1e15
"""The largest size of a reward: float32, which batches have, holds its square and sums of millions of those."""
REWARD_LIMIT = "(rewards are at most 1e15 in size)"
"""For errors."""


class OnReplay(StrEnum):
    """What becomes of a call to a tool or an interaction when its trajectory is run again from its record: after a
    crash, from the journal of the run, or after a cancellation, from what its output holds."""

    RECORDED = "recorded"
    """The recorded reply is given and nothing is run. For what has no state and no effects. A call that had begun and
    not ended is run again."""
    RERUN = "rerun"
    """The call is run again, which brings a new instance to where the old one was; the recorded reply is given. For
    state that the calls alone make up. A call that had begun and not ended is run again."""
    ONCE = "once"
    """No call is ever run twice. The recorded reply is given; a call of a tool that had begun and not ended is
    answered with an error, and a trajectory that would have to begin anew fails instead."""
    RESTART = "restart"
    """The recorded reply is given, and the state behind it counts as lost: the trajectory begins anew when something
    would read that state, such as another call. A call that had begun and not ended has it begin anew at once."""

    @classmethod
    def _missing_(cls, value: object) -> OnReplay:
        raise ConfigError(f"on_replay is {value!r}; give one of {', '.join(cls)}")


async def run_bounded(
    function: Callable[[], Awaitable[ResultT]],
    *,
    timeout_s: float | None,
    name: str = "",
    grace_s: float = ABANDON_GRACE_S,
) -> ResultT:
    """Await foreign code in a task of its own, for at most `timeout_s` and the grace behind it.

    At the time limit, and where the caller is cancelled, the task is cancelled. If it still runs after `grace_s`, it is
    abandoned: it is named in the log, counted, noted on its trajectory (`IncidentKind.ABANDONED`), and no longer waited
    for. This call thus ends in `timeout_s + grace_s`, or `grace_s` after its caller is cancelled, whatever the code
    does, unless it blocks the event loop.

    Whatever the code raises is raised here as an `Exception`. Only a cancellation of the caller raises CancelledError,
    also where the code ended with a result meanwhile.

    Args:
        function: Foreign code. It sees the caller's context variables, and the caller sees what it sets.
        timeout_s: None sets no limit; a cancellation of the caller still ends the call.
        name: What to call the code in the log if it is abandoned, such as "tool 'search'".
        grace_s: Time to end after the cancellation. Code that itself waits for other foreign code needs more than that
            code has.

    Raises:
        Abandoned: The time limit passed, and the code did not end in its grace. A `DeadlineExpired`.
        DeadlineExpired: The time limit passed. A TimeoutError of the function's own is raised as it is.
        RuntimeError: The function raised CancelledError although nobody cancelled it, tried to end the process, or
            raised what is not an `Exception`, as extensions in other languages do when they break.
    """
    task = OwnTask(function, name=name or _name_of(function))
    try:
        if timeout_s is None:
            await task.ended
        else:
            with TimeScope(timeout_s=timeout_s):
                await task.ended
    except TimeoutError as error:
        limit = f"took longer than {timeout_s or 0:g} s"
        if not await task.stop(grace_s=grace_s):
            raise Abandoned(
                f"{limit}, went on for {grace_s:g} s after it was cancelled, and was abandoned"
            ) from error
        if task.was_cancelled:
            raise DeadlineExpired(limit) from error
    except asyncio.CancelledError:
        await task.stop(grace_s=grace_s)
        raise
    return task.result()


async def call_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Awaits an async function on the event loop, and runs any other in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await run_in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def as_finite_number(value: Any) -> float | None:
    """The value as a float; None if it is no number, not finite, or an array of more than one.

    Booleans are 0 and 1, and scalars of numpy and torch are read.
    """
    try:
        scalar = value.item() if hasattr(value, "item") else value
        number = float(scalar) if isinstance(scalar, Real) else math.nan
    except BaseException:  # noqa: BLE001  (its methods are foreign code)
        return None
    return number if math.isfinite(number) else None


def as_reward(value: Any) -> float | None:
    """Return the value as a reward; None if it is not a finite number of at most `MAX_REWARD` in size.

    What counts as a number is as for `as_finite_number`.
    """
    number = as_finite_number(value)
    return None if number is None or abs(number) > MAX_REWARD else number


def describe_error(error: BaseException) -> str:
    """Type and message on one line, whatever the error's own code does."""
    message, name = one_line(safe_str(error), max_length=500), type_name(type(error))
    return f"{name}: {message}" if message else name


def describe_value(value: Any) -> str:
    """Value and type on one line, whatever the value's own code does."""
    text = one_line(safe_repr(value), max_length=80)
    return text if value is None else f"{text} ({type_name(type(value))})"


def one_line(text: str, *, max_length: int) -> str:
    """The text with its white space run together, cut to `max_length` characters."""
    text = " ".join(text[: 8 * max_length].split())
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


class TrajectoryInstance:
    """One trajectory's share of an object that all trajectories use: opened at first use, closed exactly once.

    An opening that fails or is cancelled may have set something up, so it is closed like any other; the next use
    opens another instance, under a new id.

    Args:
        name: What it is, for errors.
        trajectory: Begins the instance ids, so that they tell which belong together.
        open_as: Sets up what belongs to the given instance id.
        close_as: Frees it.
        has_state: Whether there is anything to set up and to free.
    """

    def __init__(
        self,
        name: str,
        *,
        trajectory: str = "",
        open_as: Callable[[str], Awaitable[Any]],
        close_as: Callable[[str], Awaitable[Any]],
        has_state: bool = True,
    ) -> None:
        self.name = name
        self.instance_id: str | None = None
        """None until an opening succeeded."""
        self._trajectory = trajectory
        self._open_as = open_as
        self._close_as = close_as
        self._has_state = has_state
        self._started: list[str] = []
        self._num_closing = 0
        self._is_closed = False
        self._lock = asyncio.Lock()

    @property
    def num_open(self) -> int:
        """Openings that were started and not yet closed."""
        return len(self._started) + self._num_closing

    async def open(self) -> str:
        """The instance's id, opened first if it is not.

        Raises:
            EpisodeError: It is closed.
        """
        if self.instance_id is not None and not self._is_closed:
            return self.instance_id
        if not self._has_state and not self._is_closed:
            self.instance_id = self._new_id()
            return self.instance_id
        async with self._lock:
            if self._is_closed:
                raise EpisodeError(f"{self.name} was used after its trajectory was closed; use it before")
            if self.instance_id is None:
                instance_id = self._new_id()
                self._started.append(instance_id)
                await self._open_as(instance_id)
                self.instance_id = instance_id
            return self.instance_id

    def _new_id(self) -> str:
        return "-".join(filter(None, (self._trajectory, new_id())))

    async def close(self, *, timeout_s: float) -> list[str]:
        """Closes each opening that was started. Returns what went wrong, one line each."""
        self._is_closed = True
        started, self._started = self._started, []
        self._num_closing += len(started)
        problems: list[str] = []
        for instance_id in started:
            try:
                await run_bounded(
                    partial(self._close_as, instance_id), timeout_s=timeout_s, name=f"closing {self.name}"
                )
            except DeadlineExpired as error:
                problems.append(f"closing {self.name} {error}")
            except Exception as error:  # noqa: BLE001  (close boundary: named in the record, others go on)
                problems.append(f"closing {self.name} raised {describe_error(error)}")
            finally:
                self._num_closing -= 1
        return problems


async def close_instances(
    instances: Iterable[TrajectoryInstance], *, what: str, timeout_s: float, incidents: list[Incident]
) -> None:
    """Closes all at once, each within `timeout_s`, to the end even if the caller is cancelled meanwhile. Where any is
    open, the trajectory is shown to wait for `what`.

    What goes wrong is added to `incidents`, which is thus complete after a cancellation too.
    """

    async def close(instance: TrajectoryInstance) -> None:
        problems = await instance.close(timeout_s=timeout_s)
        incidents.extend(Incident(IncidentKind.CLOSE_FAILED, problem) for problem in problems)

    async def close_all() -> None:
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(close(instance))

    instances = list(instances)
    most_openings = max([instance.num_open for instance in instances], default=0)
    if most_openings:
        with waiting_for(WaitKind.CLOSE, what):
            await run_shielded(close_all, timeout_s=(timeout_s + ABANDON_GRACE_S) * (most_openings + 1))
