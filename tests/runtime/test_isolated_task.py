from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, Abandoned, num_abandoned
from agent_loop.runtime.user_code import run_bounded
from agent_loop.testing import run_virtual
from agent_loop.trajectory import IncidentKind

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


def test_code_that_swallows_its_cancellation_is_abandoned_after_its_limit_and_grace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> float:
        call = Uncancellable()
        with IncidentCollector("group=0/rollout=0") as collector:
            with pytest.raises(Abandoned, match=r"longer than 3 s, still ran 5 s after it was cancelled"):
                await run_bounded(call, timeout_s=LIMIT_S, name="tool 'x'")
            took_s = asyncio.get_running_loop().time()
        assert num_abandoned() == 1
        [incident] = collector.incidents
        assert incident.kind is IncidentKind.ABANDONED
        assert incident.detail == "tool 'x' still ran 5 s after it was cancelled and was abandoned"
        await call.release()
        assert num_abandoned() == 0
        return took_s

    with caplog.at_level(logging.WARNING):
        assert run_virtual(scenario()) == LIMIT_S + ABANDON_GRACE_S
    assert "group=0/rollout=0: tool 'x' still ran 5 s after it was cancelled" in caplog.text


def test_a_cancelled_caller_abandons_code_that_swallows_the_cancellation_after_its_grace() -> None:
    async def scenario() -> None:
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

    run_virtual(scenario())


async def _raise_later(error: BaseException) -> None:
    await asyncio.sleep(1)
    raise error


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        StopIteration(1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_of_the_code_becomes_an_error_of_its_call(
    error: BaseException,
) -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match=f"raised {type(error).__name__}"):
            await run_bounded(partial(_raise_later, error), timeout_s=LIMIT_S)

    run_virtual(scenario())


def test_context_variables_are_passed_to_the_code_and_back() -> None:
    async def code() -> str:
        seen = COLOR.get()
        COLOR.set("blue")
        return seen

    async def scenario() -> tuple[str, str]:
        COLOR.set("red")
        return await run_bounded(code, timeout_s=LIMIT_S), COLOR.get()

    assert run_virtual(scenario()) == ("red", "blue")


def test_nested_code_is_cancelled_with_its_caller() -> None:
    async def scenario() -> list[str]:
        seen: list[str] = []

        async def inner() -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        async def outer() -> Any:
            return await run_bounded(inner, timeout_s=None)

        caller = asyncio.create_task(run_bounded(outer, timeout_s=None))
        await asyncio.sleep(1)
        caller.cancel()
        await asyncio.wait({caller})
        assert asyncio.get_running_loop().time() == 1
        return seen

    assert run_virtual(scenario()) == ["cancelled"]
