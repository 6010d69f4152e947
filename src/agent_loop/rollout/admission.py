"""Adaptive bound on the trajectories in flight. Pure: no I/O, no clock.

The method is additive increase, multiplicative decrease, as in TCP congestion control. A server should keep the context
of each trajectory in flight in its KV cache, also between two turns. If the contexts do not fit, the server drops some
and recomputes them later. Recomputed tokens are the signal of overload, like lost packets in TCP. A *round* corresponds
to TCP's round trip: a period with about one turn for each trajectory in flight.
"""

from __future__ import annotations

import math

from agent_loop.servers.pool import ServerUsage

MAX_RECOMPUTED = 0.5
"""Recomputed tokens per sampled token above which a round is costly. Computing a prompt token takes about a tenth of
the time of sampling a token in a full batch, so that the threshold is about a twentieth of the time."""
SHORT_QUEUE = 0.05
"""Share of the trajectories in flight. If fewer of them wait for a slot, a lower bound would leave servers idle."""
IDLE = 0.5
"""Share of the servers' slots, and of their KV caches. Servers that use less of both are idle, and idle slots cost more
than recomputed tokens."""
DECREASE = 0.7
"""Factor of the bound after a costly round. The bound falls less if fewer trajectories wait."""
INCREASE = 0.05
"""Share by which the bound grows."""
INCREASE_WITH_ROOM = 0.25
"""Share by which the bound grows while the KV caches have room for twice the contexts, or servers are idle."""
FREE_DEMAND = 0.25
"""Share of the KV caches. While the contexts take less at the start, the bound doubles with every update."""
HALF_DEMAND = 0.5
"""Share of the KV caches. While the contexts take less, there is room for twice as many."""
FULL_DEMAND = 0.9
"""Share of the KV caches. If the contexts take less, tokens are recomputed for other reasons than the caches' size."""


class AdmissionControl:
    """Bound on the trajectories in flight. The bound delays new trajectories and never stops running ones.

    - At the start, the bound is the number of requests that the servers compute concurrently. It doubles while the KV
      caches are almost empty.
    - Afterwards the bound grows after each round that was not costly. It also grows with every update while servers are
      idle, for example because most trajectories wait for slow tools.
    - After a costly round in which requests waited, the bound falls by the number of waiting requests, so that the
      servers stay full.

    Servers that report no usage never make a round costly.

    Args:
        num_slots: Number of requests that all servers compute concurrently. With None, the bound is infinite until a
            round is costly.
    """

    def __init__(self, *, num_slots: int | None) -> None:
        self._num_slots = num_slots or 0
        self.bound: float = math.inf if num_slots is None else max(num_slots, 1)
        """Maximum number of trajectories in flight: an integer of at least 1, or infinite."""
        self.is_probing = True
        """Whether the bound may still double."""
        self._round = ServerUsage()
        self._num_waiting: list[float] = []

    def update(
        self,
        usage: ServerUsage,
        *,
        num_in_flight: int,
        num_running: float,
        num_waiting: float,
        kv_cache_share: float | None,
        demand: float | None,
    ) -> float:
        """Update the bound with the load of the servers, and return it.

        Args:
            usage: Counters of the servers since the last update.
            num_in_flight: Number of trajectories in flight.
            num_running: Number of trajectories whose request is in a server's batch.
            num_waiting: Number of trajectories whose request waits for a slot in a server's batch.
            kv_cache_share: Share of the servers' KV caches that running requests use; None if unknown.
            demand: Size of the contexts of all trajectories in flight, as a share of the servers' KV caches; None if
                unknown.
        """
        if self.is_probing:
            self.is_probing = demand is None or demand < FREE_DEMAND
        if num_in_flight >= self.bound:
            if self.is_probing:
                self.bound *= 2
            elif num_running < IDLE * self._num_slots and (kv_cache_share or 0.0) < IDLE:
                self._grow(INCREASE_WITH_ROOM)
        self._round = self._round.plus(usage)
        self._num_waiting.append(num_waiting)
        if self._round.num_turns >= max(num_in_flight, 1):
            mean_waiting = sum(self._num_waiting) / len(self._num_waiting)
            self._end_round(num_in_flight, num_waiting=mean_waiting, demand=demand)
            self._round, self._num_waiting = ServerUsage(), []
        return self.bound

    def _end_round(self, num_in_flight: int, *, num_waiting: float, demand: float | None) -> None:
        was_costly = self._round.num_recomputed_tokens > MAX_RECOMPUTED * self._round.num_sampled_tokens
        has_queue = num_waiting > SHORT_QUEUE * num_in_flight
        has_room = demand is not None and demand < HALF_DEMAND
        if was_costly:
            self.is_probing = False
        if num_in_flight > self.bound:  # trajectories from before the last decrease still run
            return
        if was_costly and has_queue and (demand is None or demand > FULL_DEMAND):
            self.bound = max(1, math.floor(max(num_in_flight * DECREASE, num_in_flight - num_waiting)))
        elif num_in_flight >= self.bound and (has_room or not was_costly):
            self._grow(INCREASE_WITH_ROOM if has_room else INCREASE)

    def _grow(self, share: float) -> None:
        self.bound += max(1, math.floor(share * self.bound))
