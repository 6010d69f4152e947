"""Rollouts that run ahead of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

RolloutT = TypeVar("RolloutT")


class RolloutsAhead(Generic[RolloutT]):
    """Runs the rollouts of the next steps concurrently, as many as the bound on staleness allows.

    Step `k` trains the weights of version `k - 1`. Its rollout starts when version `k - 1 - max_staleness` is
    published. No token is older than that, however long a rollout takes, because the trainer waits for it. Synchronous
    training has the bound 0: the rollout of a step starts when the previous step is complete.

    Used with `async with`. Leaving the context cancels the rollouts that are running.

    Args:
        roll_out: Runs the rollout of a step.
        max_staleness: The bound, in versions.
        last_step: Last step that gets a rollout.
    """

    def __init__(
        self,
        roll_out: Callable[[int], Coroutine[Any, Any, RolloutT]],
        *,
        max_staleness: int,
        last_step: int,
    ) -> None:
        self._roll_out = roll_out
        self._max_staleness = max_staleness
        self._last_step = last_step
        self._group = asyncio.TaskGroup()
        self._running: dict[int, asyncio.Task[RolloutT | _RolloutFailure]] = {}

    async def take(self, step: int) -> RolloutT:
        """Wait for the rollout of the next step and return it, after starting the rollouts that may run now.

        Call it when all earlier steps are complete.

        Raises:
            Exception: The rollout raised it.
        """
        for each in range(step, min(step + self._max_staleness, self._last_step) + 1):
            if each not in self._running:
                self._running[each] = self._group.create_task(self._run(each), name=f"rollout of step {each}")
        outcome = await self._running.pop(step)
        if isinstance(outcome, _RolloutFailure):
            raise outcome.error
        return outcome

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running.values():
            task.cancel()
        await self._group.__aexit__(None, None, None)

    async def _run(self, step: int) -> RolloutT | _RolloutFailure:
        """Return the error of a failed rollout, which `take` raises, so that it does not cancel the other rollouts."""
        try:
            return await self._roll_out(step)
        except Exception as error:  # noqa: BLE001  (raised by `take`)
            return _RolloutFailure(error)


@dataclass(frozen=True, slots=True)
class _RolloutFailure:
    error: Exception
