"""Admission gates: limits on the number of trajectories in flight, and the queue of trajectories that wait to start."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from agent_loop.rollout.admission import AdmissionControl
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.servers.base import ServerHealth
from agent_loop.servers.pool import ServerPool, ServerUsage

UPDATE_INTERVAL_S = 1.0
"""Seconds between updates of the bound."""
ASSUMED_SLOTS = 64
"""Initial estimate of the requests that a server computes concurrently, if the server reports only the share of its KV
cache that is in use."""


class AdmissionGate:
    """Limit on the number of trajectories in flight. A trajectory enters the gate with `async with`.

    Trajectories start in the order in which they arrived. A trajectory that has started is never stopped.
    """

    def __init__(self, *, bound: float = math.inf) -> None:
        self.bound = bound
        """Maximum number of trajectories in flight."""
        self.num_in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Wait until the trajectory may start, and count it as in flight."""
        if self._waiting or self.num_in_flight >= self.bound:
            await self._wait()
        else:
            self.num_in_flight += 1

    async def __aexit__(self, *_: object) -> None:
        self.num_in_flight -= 1
        self.set_bound(self.bound)

    def set_bound(self, bound: float) -> None:
        """Change the bound, and start queued trajectories up to the bound."""
        self.bound = bound
        while self._waiting and self.num_in_flight < self.bound:
            admitted = self._waiting.popleft()
            if not admitted.done():
                self.num_in_flight += 1
                admitted.set_result(None)

    @asynccontextmanager
    async def adapting(self) -> AsyncGenerator[None]:
        """Update the bound during the `with` block, if the bound is adaptive."""
        yield

    async def _wait(self) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if (
                admitted.done() and not admitted.cancelled()
            ):  # admitted and cancelled in the same step of the loop
                self.num_in_flight -= 1
                self.set_bound(self.bound)
            raise


class AdaptiveGate(AdmissionGate):
    """Admission gate whose bound follows the load of the servers."""

    def __init__(self, pool: ServerPool) -> None:
        super().__init__()
        self._pool = pool
        self._control: AdmissionControl | None = None
        self._usage = ServerUsage()
        """Counters of the servers at the last update."""
        self._next_update_at = 0.0
        """Time of the next update on the event loop's clock."""

    @asynccontextmanager
    async def adapting(self) -> AsyncGenerator[None]:
        if self._control is None:
            num_slots = self._num_slots(await self._pool.health())
            self._control = self._control or AdmissionControl(num_slots=num_slots)
            self.set_bound(self._control.bound)
        async with running_in_background(self._adapt(self._control)):
            yield

    async def _adapt(self, control: AdmissionControl) -> None:
        """Update the bound every `UPDATE_INTERVAL_S`, without end. Concurrent calls share the updates."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(UPDATE_INTERVAL_S)
            if clock() < self._next_update_at:
                continue
            self._next_update_at = clock() + UPDATE_INTERVAL_S
            if control.is_probing and self.num_in_flight >= control.bound:
                await self._pool.health()  # the last health check may be too old to double the bound
            earlier, self._usage = self._usage, self._pool.usage
            bound = control.update(
                self._usage.since(earlier),
                num_in_flight=self.num_in_flight,
                num_running=self._pool.num_running,
                num_waiting=self._pool.num_waiting,
                kv_cache_share=self._pool.kv_cache_share,
                demand=self._pool.kv_cache_demand,
            )
            self.set_bound(bound)

    def _num_slots(self, healths: Sequence[ServerHealth]) -> int | None:
        """Return the number of requests that all servers compute concurrently; None if it is unknown for a server."""
        total = 0
        for server, health in zip(self._pool.servers, healths, strict=True):
            if server.max_concurrent is not None:
                total += server.max_concurrent
            elif health.kv_cache_share is not None:
                total += ASSUMED_SLOTS
            else:
                return None
        return total
