from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import pytest

from agent_loop.runtime.concurrency import (
    CallAborted,
    merged,
    run_abortable,
    run_shielded,
    run_together,
    run_while,
)
from agent_loop.testing import run_virtual


def test_the_first_error_is_raised_unchanged_and_the_other_calls_are_cancelled() -> None:
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


def test_shielded_cleanup_completes_before_the_cancellation_continues() -> None:
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


def test_a_cancelled_call_keeps_its_partial_result() -> None:
    kept = []
    is_aborted = asyncio.Event()

    async def call() -> str:
        await is_aborted.wait()
        return "half"

    async def abort() -> None:
        is_aborted.set()

    async def scenario() -> None:
        async with asyncio.timeout(1):
            await run_abortable(call, abort=abort, keep_partial=kept.append, grace_s=5)

    with pytest.raises(TimeoutError):
        run_virtual(scenario())
    assert kept == ["half"]


def test_a_call_that_ignores_the_abort_is_cancelled_after_the_grace_period() -> None:
    kept = []

    async def abort() -> None:
        pass

    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                call = partial(asyncio.sleep, 1000)
                await run_abortable(call, abort=abort, keep_partial=kept.append, grace_s=5)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 6
    assert kept == []


def test_an_event_aborts_a_call_and_its_result_is_returned() -> None:
    async def scenario() -> None:
        event, is_aborted = asyncio.Event(), asyncio.Event()

        async def call() -> str:
            await is_aborted.wait()
            return "half"

        async def abort() -> None:
            is_aborted.set()

        async def run(call: Callable[[], Coroutine[Any, Any, str]]) -> str | None:
            with suppress(CallAborted):
                return await run_abortable(
                    call, abort=abort, keep_partial=kept.append, grace_s=5, event=event
                )

        kept: list[str] = []
        asyncio.get_running_loop().call_later(1, event.set)
        assert await run_together([run(call), run(partial(asyncio.sleep, 1000, "late"))]) == ["half", None]
        assert await run(call) is None
        assert kept == []
        assert asyncio.get_running_loop().time() == 6
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(scenario())


async def count(to: int, *, every_s: float, closed: list[int]) -> AsyncGenerator[int]:
    """Yield the numbers below `to`, and append `to` to `closed` at the end."""
    try:
        for number in range(to):
            await asyncio.sleep(every_s)
            yield number
    finally:
        closed.append(to)


def test_merged_streams_yield_values_as_they_arrive_and_close_every_stream() -> None:
    async def scenario() -> None:
        closed: list[int] = []
        streams = [count(3, every_s=1.0, closed=closed), count(2, every_s=1.6, closed=closed)]
        assert [number async for number in merged(streams)] == [0, 0, 1, 2, 1]
        assert sorted(closed) == [2, 3]
        async with aclosing(merged(count(9, every_s=1.0, closed=closed) for _ in range(3))) as stream:
            await anext(stream)
        assert closed[2:] == [9, 9, 9]

    run_virtual(scenario())


def test_merged_streams_raise_the_first_error_and_close_every_stream() -> None:
    async def fails() -> AsyncGenerator[int]:
        await asyncio.sleep(1.5)
        raise ValueError("broken")
        yield 0

    async def scenario() -> None:
        closed: list[int] = []
        seen = -1
        with pytest.raises(ValueError, match="broken"):
            async for number in merged([fails(), count(9, every_s=1.0, closed=closed)]):
                seen = number
        assert (seen, closed) == (0, [9])

    run_virtual(scenario())


def test_run_while_cancels_a_call_when_its_condition_ends() -> None:
    async def scenario() -> None:
        assert await run_while(asyncio.sleep(1, "done"), condition=asyncio.sleep(2)) == "done"
        assert await run_while(asyncio.sleep(2, "done"), condition=asyncio.sleep(1)) is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await run_while(asyncio.sleep(2, "done"), condition=asyncio.sleep(3))
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())
