"""Concurrent calls: errors, cancellation, aborts, streams, threads, and code that does not end when it should."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from agent_loop.runtime.concurrency import (
    BackgroundTasks,
    CallAborted,
    merged,
    run_abortable,
    run_shielded,
    run_together,
    run_while,
)
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.runtime.garbage_collection import (
    OBJECTS_PER_COLLECTION,
    frozen_objects,
    infrequent_collections,
)
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, Abandoned, num_abandoned
from agent_loop.runtime.threads import OneThread, run_in_thread
from agent_loop.runtime.user_code import run_bounded
from agent_loop.trajectory import IncidentKind

pytestmark = pytest.mark.virtual_time


async def test_the_first_error_is_raised_unchanged_and_the_other_calls_are_cancelled() -> None:
    cancelled = []

    async def fails() -> None:
        await asyncio.sleep(1)
        raise KeyError("x")

    async def waits() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyError):
        await run_together([waits(), fails(), waits()])
    assert cancelled == [True, True]


async def test_shielded_cleanup_completes_before_the_cancellation_continues() -> None:
    done = []

    async def cleanup() -> None:
        await asyncio.sleep(5)
        done.append("cleaned up")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await run_shielded(cleanup, timeout_s=10)
    assert done == ["cleaned up"]


class Abortable:
    """Call that returns half of its result once it is aborted."""

    def __init__(self) -> None:
        self._is_aborted = asyncio.Event()

    async def __call__(self) -> str:
        await self._is_aborted.wait()
        return "half"

    async def abort(self) -> None:
        self._is_aborted.set()


async def test_a_cancelled_call_keeps_its_partial_result() -> None:
    kept, call = [], Abortable()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await run_abortable(call, abort=call.abort, keep_partial=kept.append, grace_s=5)
    assert kept == ["half"]


async def test_a_call_that_ignores_the_abort_is_cancelled_after_the_grace_period() -> None:
    kept, call = [], partial(asyncio.sleep, 1000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await run_abortable(call, abort=Abortable().abort, keep_partial=kept.append, grace_s=5)
    assert asyncio.get_running_loop().time() == 6
    assert kept == []


async def test_an_event_aborts_a_call_and_its_result_is_returned() -> None:
    event, call, kept = asyncio.Event(), Abortable(), list[str]()

    async def run(function: Callable[[], Coroutine[Any, Any, str]]) -> str | None:
        with suppress(CallAborted):
            return await run_abortable(
                function, abort=call.abort, keep_partial=kept.append, grace_s=5, event=event
            )

    asyncio.get_running_loop().call_later(1, event.set)
    assert await run_together([run(call), run(partial(asyncio.sleep, 1000, "late"))]) == ["half", None]
    assert await run(call) is None
    assert kept == []
    assert asyncio.get_running_loop().time() == 6
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def count(to: int, *, every_s: float, closed: list[int]) -> AsyncGenerator[int]:
    """Yield the numbers below `to`, and append `to` to `closed` at the end."""
    try:
        for number in range(to):
            await asyncio.sleep(every_s)
            yield number
    finally:
        closed.append(to)


async def test_merged_streams_yield_values_as_they_arrive_and_close_every_stream() -> None:
    closed: list[int] = []
    streams = [count(3, every_s=1.0, closed=closed), count(2, every_s=1.6, closed=closed)]
    assert [number async for number in merged(streams)] == [0, 0, 1, 2, 1]
    assert sorted(closed) == [2, 3]
    async with aclosing(merged(count(9, every_s=1.0, closed=closed) for _ in range(3))) as stream:
        await anext(stream)
    assert closed[2:] == [9, 9, 9]


async def test_merged_streams_raise_the_first_error_and_close_every_stream() -> None:
    async def fails() -> AsyncGenerator[int]:
        await asyncio.sleep(1.5)
        raise ValueError("broken")
        yield 0

    closed, seen = list[int](), list[int]()
    with pytest.raises(ValueError, match="broken"):
        async for number in merged([fails(), count(9, every_s=1.0, closed=closed)]):
            seen.append(number)
    assert (seen, closed) == ([0], [9])


async def test_run_while_cancels_a_call_when_its_condition_ends() -> None:
    assert await run_while(asyncio.sleep(1, "done"), condition=asyncio.sleep(2)) == "done"
    assert await run_while(asyncio.sleep(2, "done"), condition=asyncio.sleep(1)) is None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await run_while(asyncio.sleep(2, "done"), condition=asyncio.sleep(3))
    assert len(asyncio.all_tasks()) == 1


async def test_closing_background_tasks_cancels_them_and_waits_for_their_cleanup() -> None:
    cleaned_up: list[str] = []

    async def hang(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned_up.append(name)

    tasks = BackgroundTasks()
    tasks.start(hang("first"))
    tasks.start(hang("second"))
    await asyncio.sleep(1)
    assert len(tasks) == 2
    await tasks.close()
    assert (cleaned_up, len(tasks)) == (["first", "second"], 0)
    await tasks.close()


LIMIT_S = 3.0
COLOR: ContextVar[str] = ContextVar("color")


class Uncancellable:
    """Swallows every cancellation until it is released."""

    def __init__(self) -> None:
        self.num_cancellations = 0
        self.released = asyncio.Event()

    async def __call__(self) -> str:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.num_cancellations += 1
        return "late"

    async def release(self) -> None:
        self.released.set()
        await asyncio.sleep(1)


async def test_code_that_swallows_its_cancellation_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    call = Uncancellable()
    with caplog.at_level(logging.WARNING), IncidentCollector("group=0/rollout=0") as collector:
        with pytest.raises(Abandoned, match=r"longer than 3 s, still ran 5 s after it was cancelled"):
            await run_bounded(call, timeout_s=LIMIT_S, name="tool 'x'")
        assert asyncio.get_running_loop().time() == LIMIT_S + ABANDON_GRACE_S
    assert num_abandoned() == 1
    [incident] = collector.incidents
    assert incident.kind is IncidentKind.ABANDONED
    assert incident.detail == "tool 'x' still ran 5 s after it was cancelled and was abandoned"
    await call.release()
    assert num_abandoned() == 0
    assert "group=0/rollout=0: tool 'x' still ran 5 s after it was cancelled" in caplog.text


async def test_a_cancelled_caller_abandons_code_that_swallows_the_cancellation_after_its_grace() -> None:
    call = Uncancellable()
    caller = asyncio.create_task(run_bounded(call, timeout_s=None))
    await asyncio.sleep(1)
    caller.cancel()
    await asyncio.sleep(1)
    caller.cancel()  # a second time, while the caller waits for the grace period
    await asyncio.wait({caller})
    assert caller.cancelled()
    assert asyncio.get_running_loop().time() == 1 + ABANDON_GRACE_S
    await call.release()


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(1)], ids=repr
)
async def test_any_exception_of_the_code_becomes_an_error_of_its_call(error: BaseException) -> None:
    async def code() -> None:
        await asyncio.sleep(1)
        raise error

    with pytest.raises(RuntimeError, match=f"raised {type(error).__name__}"):
        await run_bounded(code, timeout_s=LIMIT_S)


async def test_context_variables_are_passed_to_the_code_and_back() -> None:
    async def code() -> str:
        seen = COLOR.get()
        COLOR.set("blue")
        return seen

    COLOR.set("red")
    assert (await run_bounded(code, timeout_s=LIMIT_S), COLOR.get()) == ("red", "blue")


def test_hanging_functions_do_not_block_other_functions() -> None:
    release = threading.Event()

    async def main() -> None:
        hanging = [asyncio.ensure_future(run_in_thread(release.wait, 20)) for _ in range(40)]
        assert await run_together(run_in_thread(abs, -number) for number in range(40)) == list(range(40))
        assert not any(task.done() for task in hanging)
        release.set()
        await asyncio.wait(hanging)

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_starts_its_own_threads() -> None:
    asyncio.run(run_in_thread(abs, -1))
    pid = os.fork()
    if not pid:
        os._exit(0 if asyncio.run(run_in_thread(abs, -1)) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


async def test_one_thread_runs_functions_in_order_and_raises_their_errors() -> None:
    thread, idents = OneThread("test"), []

    def note(number: int) -> int:
        idents.append(threading.get_ident())
        if number == 2:
            raise KeyError(number)
        return number

    assert await run_together(thread.run(note, number) for number in (0, 1)) == [0, 1]
    with pytest.raises(KeyError):
        await thread.run(note, 2)
    assert await thread.run(note, 3) == 3
    thread.shutdown(wait=True)
    assert len(set(idents)) == 1
    assert threading.get_ident() not in idents


def test_a_call_queued_behind_a_hanging_one_can_be_cancelled() -> None:
    release = threading.Event()

    async def main() -> None:
        thread = OneThread("test")
        ran: list[int] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.run(release.wait, 20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.run(ran.append, 1)
        release.set()
        await thread.run(ran.append, 2)
        thread.shutdown()
        assert ran == [2]

    asyncio.run(main())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("x")])
def test_an_error_of_the_main_coroutine_is_raised(error: BaseException) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(type(error)):
        run_to_end(main())


def test_ctrl_c_cancels_the_main_coroutine_and_ends_the_event_loop() -> None:
    cancelled: list[bool] = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        run_to_end(main())
    assert cancelled == [True]


def test_a_task_that_swallows_its_cancellation_does_not_keep_the_event_loop_open() -> None:
    released: list[asyncio.Event] = []

    async def uncancellable() -> None:
        while not released[0].is_set():
            try:
                await released[0].wait()
            except asyncio.CancelledError:
                continue

    async def main() -> asyncio.Task[None]:
        released.append(asyncio.Event())
        task = asyncio.create_task(uncancellable())
        await asyncio.sleep(0)
        return task

    task = run_to_end(main(), grace_s=0.05)
    assert not task.done()
    assert num_abandoned() == 0  # the task's event loop is closed
    task.get_coro().close()


@pytest.fixture(autouse=True)
def usual_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_raised_until_the_last_context_exits() -> None:
    first, second = infrequent_collections(), infrequent_collections()
    with first:
        second.__enter__()
    assert gc.get_threshold() == (OBJECTS_PER_COLLECTION, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_objects_are_frozen_only_within_the_context() -> None:
    gc.unfreeze()
    with frozen_objects():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
