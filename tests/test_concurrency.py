from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from agent_loop.concurrency import (
    OneThread,
    merged,
    run_abortable,
    run_in_thread,
    run_shielded,
    run_together,
    run_while,
)
from agent_loop.testing import run_virtual


def test_the_virtual_clock_jumps_over_an_hour() -> None:
    async def scenario() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run_virtual(scenario()) == 3600
    assert time.perf_counter() - started < 60


def test_the_virtual_clock_waits_for_threads() -> None:
    async def scenario() -> str:
        async with asyncio.timeout(1000):
            return await run_in_thread(lambda: threading.current_thread().name)

    assert "agent-loop" in run_virtual(scenario())


def test_a_deadlock_in_virtual_time_is_an_error() -> None:
    async def scenario() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="can never happen"):
        run_virtual(scenario())


def test_the_first_error_comes_out_as_it_is_and_the_others_are_cancelled() -> None:
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
        run_virtual(run_together([waits(), fails(), waits()]))
    assert cancelled == [True, True]


def test_shielded_cleanup_ends_before_the_cancellation_goes_on() -> None:
    done = []

    async def cleanup() -> None:
        await asyncio.sleep(5)
        done.append("cleaned up")

    async def scenario() -> None:
        async with asyncio.timeout(1):
            await run_shielded(cleanup, timeout_s=10)

    with pytest.raises(TimeoutError):
        run_virtual(scenario())
    assert done == ["cleaned up"]


def test_shielded_cleanup_is_bounded() -> None:
    with pytest.raises(TimeoutError):
        run_virtual(run_shielded(lambda: asyncio.sleep(100), timeout_s=1))


def test_a_cancelled_call_hands_over_what_it_has() -> None:
    kept = []
    asked = asyncio.Event()

    async def call() -> str:
        await asked.wait()
        return "half"

    async def abort() -> None:
        asked.set()

    async def scenario() -> None:
        async with asyncio.timeout(1):
            await run_abortable(call(), abort=abort, keep_partial=kept.append, grace_s=5)

    with pytest.raises(TimeoutError):
        run_virtual(scenario())
    assert kept == ["half"]


def test_a_call_that_ignores_the_abort_is_cut() -> None:
    kept = []

    async def abort() -> None:
        pass

    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await run_abortable(asyncio.sleep(1000), abort=abort, keep_partial=kept.append, grace_s=5)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 6
    assert kept == []


def test_an_exception_in_a_thread_arrives() -> None:
    def fails() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        run_virtual(run_in_thread(fails))


async def counting(to: int, *, every_s: float, closed: list[int]) -> AsyncGenerator[int]:
    try:
        for number in range(to):
            await asyncio.sleep(every_s)
            yield number
    finally:
        closed.append(to)


def test_merged_streams_yield_as_it_comes_and_are_all_closed() -> None:
    async def scenario() -> None:
        closed: list[int] = []
        streams = [counting(3, every_s=1.0, closed=closed), counting(2, every_s=1.6, closed=closed)]
        assert [number async for number in merged(streams)] == [0, 0, 1, 2, 1]
        assert sorted(closed) == [2, 3]
        async with aclosing(merged(counting(9, every_s=1.0, closed=closed) for _ in range(3))) as left:
            await anext(left)
        assert closed[2:] == [9, 9, 9]

    run_virtual(scenario())


def test_merged_streams_fail_with_the_first_that_fails() -> None:
    async def fails() -> AsyncGenerator[int]:
        await asyncio.sleep(1.5)
        raise ValueError("broken")
        yield 0

    async def scenario() -> None:
        closed: list[int] = []
        seen = -1
        with pytest.raises(ValueError, match="broken"):
            async for number in merged([fails(), counting(9, every_s=1.0, closed=closed)]):
                seen = number
        assert (seen, closed) == (0, [9])

    run_virtual(scenario())


def test_a_call_runs_while_its_condition_lasts() -> None:
    async def scenario() -> None:
        assert await run_while(asyncio.sleep(1, "done"), condition=asyncio.sleep(2)) == "done"
        assert await run_while(asyncio.sleep(2, "done"), condition=asyncio.sleep(1)) is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await run_while(asyncio.sleep(2, "done"), condition=asyncio.sleep(3))
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


def test_one_thread_runs_what_it_is_given_in_order_and_hands_errors_over() -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_what_waits_in_one_thread_behind_something_that_hangs_can_be_left() -> None:
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
