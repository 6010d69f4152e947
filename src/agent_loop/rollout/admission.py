"""How many trajectories may be in flight, by what their servers compute twice. Pure: no I/O, no clock.

Additive increase, multiplicative decrease, as of a sender on a network. A trajectory in flight wants its context kept
in a server's KV cache, between two turns too. Where not all contexts fit, servers drop some and compute them again:
what a lost packet is to a sender. A *round*, in which about each trajectory in flight had one turn, takes the place of
the round trip.
"""

from __future__ import annotations

import math

from agent_loop.servers.usage import ServerUsage

MAX_RECOMPUTED = 0.5
"""Tokens computed again per token sampled, above which a round was costly. Computing a prompt token takes some tenth of
the time of sampling one in a full batch, so that this costs about a twentieth."""
IDLE_LINE = 0.05
"""Of the trajectories in flight: where so few wait for a place, fewer trajectories would leave servers idle."""
IDLE = 0.5
"""Of the servers' places, and of their KV caches: where requests take less of both, whatever is computed again costs
less than what stands idle."""
DECREASE = 0.7
INCREASE = 0.05
INCREASE_WITH_ROOM = 0.25
"""While the KV caches have room for twice as much, or servers stand idle."""
FREE_DEMAND = 0.25
"""Of the KV caches, below which the bound doubles with every look at the beginning."""
HALF_DEMAND = 0.5
FULL_DEMAND = 0.9
"""Of the KV caches, below which what is computed again has other causes than their size."""


class AdmissionControl:
    """The bound on trajectories in flight. It holds back new ones only.

    It begins with as many as the servers compute at once, and doubles while the KV caches are almost empty. Then it
    grows after each round that was not costly, and with every look while servers stand idle, as when most trajectories
    wait for slow tools. After a costly round with requests waiting it falls by as many as wait, so that the servers
    stay as full as they can be. Servers that say nothing of themselves are not costly.
    """

    def __init__(self, *, num_places: int | None) -> None:
        """Args: num_places: Requests that all servers compute at once; None is any number, and bounds nothing until
        a round was costly."""
        self._num_places = num_places or 0
        self.bound: float = math.inf if num_places is None else max(num_places, 1)
        """At least 1; whole, or infinite."""
        self.is_probing = True
        """The bound may double."""
        self._round = ServerUsage()
        self._lines: list[float] = []

    def update(
        self,
        use: ServerUsage,
        *,
        num_in_flight: int,
        num_running: float,
        num_waiting: float,
        kv_cache_share: float | None,
        demand: float | None,
    ) -> float:
        """Takes note of what the servers did since the last look, and returns the bound.

        Args:
            num_running: Of the trajectories in flight, those whose turn has a place in a server's batch.
            num_waiting: Of the trajectories in flight, those whose turn waits for a place in a server's batch.
            kv_cache_share: What running requests take of the servers' KV caches; None if it is not known.
            demand: What the contexts of the trajectories in flight take, in relation to the servers' KV caches; None if
                it is not known.
        """
        if self.is_probing:
            self.is_probing = demand is None or demand < FREE_DEMAND
        if num_in_flight >= self.bound:
            if self.is_probing:
                self.bound *= 2
            elif num_running < IDLE * self._num_places and (kv_cache_share or 0.0) < IDLE:
                self._grow(INCREASE_WITH_ROOM)
        self._round = self._round.plus(use)
        self._lines.append(num_waiting)
        if self._round.num_turns >= max(num_in_flight, 1):
            self._end_round(num_in_flight, num_waiting=sum(self._lines) / len(self._lines), demand=demand)
            self._round, self._lines = ServerUsage(), []
        return self.bound

    def _end_round(self, num_in_flight: int, *, num_waiting: float, demand: float | None) -> None:
        was_costly = self._round.num_recomputed_tokens > MAX_RECOMPUTED * self._round.num_sampled_tokens
        has_line = num_waiting > IDLE_LINE * num_in_flight
        has_room = demand is not None and demand < HALF_DEMAND
        if was_costly:
            self.is_probing = False
        if num_in_flight > self.bound:  # what began before the last decrease has still to end
            return
        if was_costly and has_line and (demand is None or demand > FULL_DEMAND):
            self.bound = max(1, math.floor(max(num_in_flight * DECREASE, num_in_flight - num_waiting)))
        elif num_in_flight >= self.bound and (has_room or not was_costly):
            self._grow(INCREASE_WITH_ROOM if has_room else INCREASE)

    def _grow(self, share: float) -> None:
        self.bound += max(1, math.floor(share * self.bound))
