"""Time scopes: the end of the limit, moving it, and cancellations by other code."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_body_that_ends_in_time_is_not_cancelled() -> None:
    async def scenario() -> None:
        scope = TimeScope(timeout_s=5)
        with scope:
            await asyncio.sleep(4)
        await asyncio.sleep(100)
        assert not scope.has_expired

    run_virtual(scenario())


@pytest.mark.parametrize(("moves", "end"), [([20.0], 20), ([None, 3.0], 3), ([1.5, 9.0], 9), ([0.0], 1)])
def test_a_scope_ends_at_the_time_that_was_set_last(moves: list[float | None], end: float) -> None:
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


def test_the_outer_scope_ends_the_body_of_the_inner_scope() -> None:
    async def scenario() -> None:
        outer, inner = TimeScope(timeout_s=5), TimeScope(timeout_s=50)
        with pytest.raises(TimeoutError), outer, inner:
            await asyncio.sleep(100)
        assert (outer.has_expired, inner.has_expired, now()) == (True, False, 5)

    run_virtual(scenario())


def test_a_cancellation_by_other_code_is_delivered_even_if_the_scope_expires_too() -> None:
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
    """Timing of one scope and its body."""

    begins_at: float
    limit: float | None
    moves: list[tuple[float, float | None]]
    """Pairs of a delay in seconds and the seconds from then to the new end."""
    lasts: float

    def times(self, unit: float) -> Plan:
        """Return the plan with all seconds multiplied by `unit`."""
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


# Scopes end at odd seconds and bodies at even ones, so that none end together.
LIMITS = st.none() | st.integers(1, 40).map(lambda seconds: 2 * seconds + 1)
PLANS = st.builds(
    Plan,
    st.integers(0, 20).map(lambda seconds: 2 * seconds),
    LIMITS,
    st.lists(st.tuples(st.integers(0, 10).map(lambda seconds: 2 * seconds), LIMITS), max_size=4),
    st.integers(0, 40).map(lambda seconds: 2 * seconds),
)


@pytest.mark.parametrize("unit", [1.0, 0.125], ids=["ends in whole seconds", "ends in eighths"])
@given(plans=st.lists(PLANS, max_size=30))
@settings(deadline=None)
def test_many_concurrent_scopes_end_when_asyncio_timeouts_do(plans: list[Plan], unit: float) -> None:
    plans = [plan.times(unit) for plan in plans]

    async def ends(calls: list[asyncio.Task[float]]) -> list[float]:
        return [await call for call in calls]

    async def scenario() -> None:
        ours = [asyncio.ensure_future(plan.within_ours()) for plan in plans]
        asyncios = [asyncio.ensure_future(plan.within_asyncios()) for plan in plans]
        assert await ends(ours) == await ends(asyncios)

    run_virtual(scenario())


def test_a_scope_that_was_left_cancels_its_timer() -> None:
    async def scenario() -> None:
        loop: Any = asyncio.get_running_loop()
        for _ in range(10_000):
            with TimeScope(timeout_s=100):
                pass
        await asyncio.sleep(0)
        assert (
            len(loop._scheduled) <= 200
        )  # asyncio removes cancelled timers once they are most of its timers

    run_virtual(scenario())
