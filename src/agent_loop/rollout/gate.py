"""Where trajectories wait before they begin."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from agent_loop.rollout.admission import AdmissionControl
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.servers.base import ServerHealth
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.use import ServerUse

LOOK_EVERY_S = 1.0
"""How often the bound is adapted."""
ASSUMED_PLACES = 64
"""Of a server that tells how full its KV cache is, but not how many requests it computes at once; a beginning."""


class AdmissionGate:
    """Lets trajectories begin in their order, so many at once, each with `async with`. One that has begun is never
    stopped."""

    def __init__(self, *, bound: float = math.inf) -> None:
        self.bound = bound
        """Trajectories in flight at most."""
        self.num_in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Waits for its turn, and counts as in flight from here on."""
        if self._waiting or self.num_in_flight >= self.bound:
            await self._wait()
        else:
            self.num_in_flight += 1

    async def __aexit__(self, *_: object) -> None:
        self.num_in_flight -= 1
        self.set_bound(self.bound)

    def set_bound(self, bound: float) -> None:
        """Changes the bound, and lets in whoever fits."""
        self.bound = bound
        while self._waiting and self.num_in_flight < self.bound:
            first = self._waiting.popleft()
            if not first.done():
                self.num_in_flight += 1
                first.set_result(None)

    @asynccontextmanager
    async def adapting(self) -> AsyncGenerator[None]:
        """Keeps the bound right meanwhile."""
        yield

    async def _wait(self) -> None:
        """Returns when it is counted."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was let in at this very moment
                self.num_in_flight -= 1
                self.set_bound(self.bound)
            raise


class AdaptiveGate(AdmissionGate):
    """One whose bound follows what the servers do."""

    def __init__(self, pool: ServerPool) -> None:
        super().__init__()
        self._pool = pool
        self._control: AdmissionControl | None = None
        self._use = ServerUse()
        """What the servers had done at the last look."""
        self._look_at = 0.0
        """When the next look is due."""

    @asynccontextmanager
    async def adapting(self) -> AsyncGenerator[None]:
        if self._control is None:
            num_places = self._num_places(await self._pool.health())
            self._control = self._control or AdmissionControl(num_places=num_places)
            self.set_bound(self._control.bound)
        async with running_in_background(self._adapt(self._control)):
            yield

    async def _adapt(self, control: AdmissionControl) -> None:
        """For ever. Several may do so at a time: each look is taken once."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if clock() < self._look_at:
                continue
            self._look_at = clock() + LOOK_EVERY_S
            if control.is_probing and self.num_in_flight >= control.bound:
                await self._pool.health()  # what the watch knows is too old for this
            earlier, self._use = self._use, self._pool.use
            bound = control.update(
                self._use.since(earlier),
                num_in_flight=self.num_in_flight,
                num_running=self._pool.num_running,
                num_waiting=self._pool.num_waiting,
                kv_cache_share=self._pool.kv_cache_share,
                demand=self._pool.kv_cache_demand,
            )
            self.set_bound(bound)

    def _num_places(self, healths: Sequence[ServerHealth]) -> int | None:
        """Requests that all servers compute at once; None if of one nothing is known."""
        total = 0
        for server, health in zip(self._pool.servers, healths, strict=True):
            if server.max_concurrent is not None:
                total += server.max_concurrent
            elif health.kv_cache_share is not None:
                total += ASSUMED_PLACES
            else:
                return None
        return total
