from __future__ import annotations

import asyncio
import threading
import time

import pytest

from agent_loop.concurrency import run_abortable, run_in_thread, run_shielded, run_together
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
