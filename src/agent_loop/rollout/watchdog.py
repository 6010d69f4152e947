"""Watchdog: log what every trajectory waits for when a rollout makes no progress."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence

from agent_loop.rollout.gate import AdmissionGate
from agent_loop.runtime.activity import Activity, ActivityMonitor
from agent_loop.servers.base import ServerHealth
from agent_loop.servers.pool import ServerPool

logger = logging.getLogger(__name__)

MAX_LISTED = 10
OWN_CODE = "the loop's own code"


class Watchdog:
    """Warns when there was no progress for `silence_s`, and again each time this period has doubled."""

    def __init__(
        self,
        activity_monitor: ActivityMonitor,
        *,
        gate: AdmissionGate,
        pool: ServerPool,
        silence_s: float | None,
    ) -> None:
        self._activity_monitor = activity_monitor
        self._gate = gate
        self._pool = pool
        self._silence_s = math.inf if silence_s is None else silence_s
        self._limit_s = self._silence_s
        """Seconds without progress after which the next report is due."""

    async def watch(self) -> None:
        """Report until cancelled. Where several calls watch the same trajectories, each report is made once."""
        clock = asyncio.get_running_loop().time
        self._activity_monitor.note("the rollout", "began", at=clock())
        while math.isfinite(self._silence_s):
            silence_s = clock() - self._activity_monitor.progressed_at
            if silence_s < self._silence_s:
                self._limit_s = self._silence_s
            if silence_s >= self._limit_s:
                self._limit_s *= 2
                await self._report()
            else:
                await asyncio.sleep(self._limit_s - silence_s)

    async def _report(self) -> None:
        last_event, silent_since = self._activity_monitor.last_event, self._activity_monitor.progressed_at
        healths = await self._pool.health()
        now = asyncio.get_running_loop().time()
        lines = [
            f"no progress for {now - silent_since:.0f} s; last: {last_event}",
            counts(self._activity_monitor.activities, num_held_back=self._gate.num_waiting),
            *longest_waits(self._activity_monitor.activities, now=now),
            *server_lines(self._pool, healths),
        ]
        logger.warning("\n  ".join(lines))


def counts(activities: Sequence[Activity], *, num_held_back: int) -> str:
    """Return a line with the number of trajectories, in total and by what they wait for."""
    kinds = Counter(
        str(kind) for activity in activities for kind in {wait.kind for wait in activity.waits} or [OWN_CODE]
    )
    waits = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "none"
    held = f"; {num_held_back} more have not started (rollout.max_concurrent)" if num_held_back else ""
    return f"{len(activities)} trajectories in flight, by what they wait for: {waits}{held}"


def longest_waits(activities: Sequence[Activity], *, now: float) -> list[str]:
    """Return one line for each of the trajectories that have waited longest."""
    ordered = sorted(
        activities, key=lambda activity: min([w.since for w in activity.waits] or [activity.since])
    )
    lines = [f"{activity.trajectory_id}: {_waits_of(activity, now=now)}" for activity in ordered[:MAX_LISTED]]
    if len(ordered) > MAX_LISTED:
        lines.append(f"and {len(ordered) - MAX_LISTED} more")
    return lines


def server_lines(pool: ServerPool, healths: Sequence[ServerHealth]) -> list[str]:
    """Return one line for each server, and one for the queue."""
    in_flight = pool.balancer.in_flight
    lines: list[str] = []
    for server, health in zip(pool.servers, healths, strict=True):
        state = "alive" if health.is_alive else f"not alive ({health.detail})"
        if server.name in pool.lost:
            state = f"excluded ({pool.lost[server.name]}), {state}"
        cache = "unknown" if health.kv_cache_share is None else f"{health.kv_cache_share:.0%}"
        lines.append(
            f"server {server.name}: {state}, {in_flight.get(server.name, 0)} requests of this worker; it reports "
            f"{health.num_running} running, {health.num_waiting} waiting, KV cache in use {cache}, "
            f"weights {health.weight_version}"
        )
    if pool.balancer.num_queued:
        lines.append(f"{pool.balancer.num_queued} requests are queued for any server")
    return lines


def _waits_of(activity: Activity, *, now: float) -> str:
    if not activity.waits:
        return f"{OWN_CODE} for {now - activity.since:.0f} s (no request, tool or reward is in flight)"
    return ", ".join(f"{wait} for {now - wait.since:.0f} s" for wait in activity.waits)
