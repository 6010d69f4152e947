"""A scope ends what it holds at its time, wherever that was moved, and tells its end from a cancellation by others."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.runtime import time_scope
from agent_loop.runtime.time_scope import TimeScope
from agent_loop.testing import run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_body_that_takes_too_long_ends_with_a_timeout_error() -> None:
    async def scenario() -> None:
        scope = TimeScope(timeout_s=5)
        with pytest.raises(TimeoutError), scope:
            await asyncio.sleep(100)
        assert (scope.has_expired, now()) == (True, 5)
        await asyncio.sleep(1)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run_virtual(scenario())


def test_a_body_that_ends_in_time_is_left_alone_also_later() -> None:
    async def scenario() -> None:
        scope = TimeScope(timeout_s=5)
        with scope:
            await asyncio.sleep(4)
        await asyncio.sleep(100)
        assert not scope.has_expired

    run_virtual(scenario())


@pytest.mark.parametrize(("moves", "end"), [([20.0], 20), ([None, 3.0], 3), ([1.5, 9.0], 9), ([0.0], 1)])
def test_a_scope_ends_at_the_time_that_it_was_moved_to_last(moves: list[float | None], end: float) -> None:
    async def scenario() -> float:
        scope = TimeScope(timeout_s=5)
        with pytest.raises(TimeoutError), scope:
            await asyncio.sleep(1)
            for ends_at in moves:
                scope.move(ends_at)
            await asyncio.sleep(100)
        return now()

    assert run_virtual(scenario()) == end


def test_a_scope_without_a_limit_never_ends() -> None:
    async def scenario() -> None:
        with TimeScope(timeout_s=None) as scope:
            await asyncio.sleep(1e6)
        with TimeScope(timeout_s=5) as scope:
            scope.move(None)
            await asyncio.sleep(1e6)
        assert not scope.has_expired

    run_virtual(scenario())


def test_the_outer_of_two_scopes_ends_the_body_of_the_inner() -> None:
    async def scenario() -> None:
        outer, inner = TimeScope(timeout_s=5), TimeScope(timeout_s=50)
        with pytest.raises(TimeoutError), outer, inner:
            await asyncio.sleep(100)
        assert (outer.has_expired, inner.has_expired, now()) == (True, False, 5)

    run_virtual(scenario())


def test_a_cancellation_by_somebody_else_goes_on_even_if_the_scope_expires_too() -> None:
    async def hang(scope: TimeScope) -> None:
        with scope:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(100)

    async def scenario() -> None:
        scope = TimeScope(timeout_s=5)
        task = asyncio.ensure_future(hang(scope))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait({task})
        assert (task.cancelled(), scope.has_expired, now()) == (True, True, 5)

    run_virtual(scenario())


def test_an_exception_of_the_body_is_raised_as_it_is() -> None:
    async def scenario() -> None:
        with TimeScope(timeout_s=5):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                raise ValueError("broken") from None

    with pytest.raises(ValueError, match="broken"):
        run_virtual(scenario())


class Plan(NamedTuple):
    """What is done within one scope."""

    begins_at: float
    limit: float | None
    moves: list[tuple[float, float | None]]
    """After so many seconds, to so many from then on."""
    lasts: float

    def times(self, unit: float) -> Plan:
        """The same with other seconds."""
        moves = [(after * unit, None if to is None else to * unit) for after, to in self.moves]
        limit = None if self.limit is None else self.limit * unit
        return Plan(self.begins_at * unit, limit, moves, self.lasts * unit)

    async def within_ours(self) -> float:
        await asyncio.sleep(self.begins_at)
        try:
            with TimeScope(timeout_s=self.limit) as scope:
                for after, to in self.moves:
                    await asyncio.sleep(after)
                    scope.move(None if to is None else now() + to)
                await asyncio.sleep(self.lasts)
        except TimeoutError:
            return -now()
        return now()

    async def within_asyncios(self) -> float:
        await asyncio.sleep(self.begins_at)
        try:
            async with asyncio.timeout(self.limit) as scope:
                for after, to in self.moves:
                    await asyncio.sleep(after)
                    scope.reschedule(None if to is None else now() + to)
                await asyncio.sleep(self.lasts)
        except TimeoutError:
            return -now()
        return now()


# Odd and even seconds, so that nothing ends at the moment in which its scope does.
LIMITS = st.none() | st.integers(1, 40).map(lambda seconds: 2 * seconds + 1)
PLANS = st.builds(
    Plan,
    st.integers(0, 20).map(lambda seconds: 2 * seconds),
    LIMITS,
    st.lists(st.tuples(st.integers(0, 10).map(lambda seconds: 2 * seconds), LIMITS), max_size=4),
    st.integers(0, 40).map(lambda seconds: 2 * seconds),
)


@pytest.mark.parametrize("unit", [1.0, 0.125], ids=["most ends are far", "most ends are near"])
@given(plans=st.lists(PLANS, max_size=30))
@settings(deadline=None)
def test_many_scopes_at_once_end_when_those_of_asyncio_do(plans: list[Plan], unit: float) -> None:
    plans = [plan.times(unit) for plan in plans]

    async def ends(calls: list[asyncio.Task[float]]) -> list[float]:
        return [await call for call in calls]

    async def scenario() -> None:
        ours = [asyncio.ensure_future(plan.within_ours()) for plan in plans]
        asyncios = [asyncio.ensure_future(plan.within_asyncios()) for plan in plans]
        assert await ends(ours) == await ends(asyncios)

    run_virtual(scenario())


def test_scopes_that_were_left_take_no_room_and_no_timer() -> None:
    async def scenario() -> None:
        with TimeScope(timeout_s=1000):
            for _ in range(10_000):
                with TimeScope(timeout_s=100):
                    pass
            alarms = time_scope._HERE.alarms  # pyright: ignore[reportPrivateUsage]
            assert alarms is not None
            assert not alarms._near  # pyright: ignore[reportPrivateUsage]
            assert len(alarms._far) == 1  # pyright: ignore[reportPrivateUsage]
            for _ in range(10_000):
                with TimeScope(timeout_s=0.5):
                    pass
                await asyncio.sleep(0.01)
            assert len(alarms._near) <= 0.5 / 0.01 + 1  # pyright: ignore[reportPrivateUsage]
        assert alarms._timer is None  # pyright: ignore[reportPrivateUsage]

    run_virtual(scenario())
