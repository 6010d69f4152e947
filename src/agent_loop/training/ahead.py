"""How far rollouts run ahead of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

RolloutT = TypeVar("RolloutT")


class RolloutsAhead(Generic[RolloutT]):
    """Runs the rollouts of the steps to come, so many of them at once that none becomes too old.

    Step `k` trains the weights of version `k - 1`. If its rollout begins when version `k - 1 - max_staleness` is
    there, none of its tokens is older than that, however long a rollout takes: the trainer waits for it. Synchronous
    training is the bound 0: the rollout of a step begins when the step before it is complete.

    Used with `async with`; leaving it cancels what still runs.

    Args:
        roll_out: Makes the rollout of a step.
        max_staleness: The bound, in versions.
        last_step: Nothing is rolled out for steps behind it.
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
        self._running: dict[int, asyncio.Task[RolloutT]] = {}

    async def take(self, step: int) -> RolloutT:
        """The rollout of the next step, when it is there. All steps before it are complete; the rollouts that this
        allows begin now.

        Raises:
            Exception: What the rollout raised.
        """
        for each in range(step, min(step + self._max_staleness, self._last_step) + 1):
            if each not in self._running:
                self._running[each] = asyncio.create_task(
                    self._roll_out(each), name=f"rollout of step {each}"
                )
        try:
            return await self._running[step]
        finally:
            del self._running[step]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
