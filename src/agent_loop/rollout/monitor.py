"""Monitor of the trajectories of one worker: their traces, the event loop's lag, and reports of stalls."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from agent_loop.rollout.event_loop_lag import LagMonitor
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.runtime.activity import Activity, ActivityMonitor
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.servers.base import ServerHealth
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Trace, Trajectory

logger = logging.getLogger(__name__)

MAX_LISTED = 10
OWN_CODE = "the loop's own code"


class TrajectoryMonitor:
    """Observes trajectories while they run.

    Logs what every trajectory waits for when there was no progress for `silence_s`, and again each time this period has
    doubled.

    Args:
        gate: Admits the trajectories.
        pool: The servers.
        silence_s: Seconds without progress after which the monitor warns. None disables the reports.
    """

    def __init__(self, *, gate: AdmissionGate, pool: ServerPool, silence_s: float | None) -> None:
        self.activity_monitor = ActivityMonitor()
        self._gate = gate
        self._pool = pool
        self._silence_s = math.inf if silence_s is None else silence_s
        self._limit_s = self._silence_s
        """Seconds without progress after which the next report is due."""

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[LagMonitor]:
        """Monitor the trajectories that run in the body. Several such contexts may overlap."""
        with LagMonitor(self.activity_monitor) as lag:
            async with running_in_background(self._report_stalls()):
                yield lag

    async def _report_stalls(self) -> None:
        """Report until cancelled. Where several calls watch the same trajectories, each report is made once."""
        clock = asyncio.get_running_loop().time
        self.activity_monitor.note("the rollout", "began", at=clock())
        while math.isfinite(self._silence_s):
            silence_s = clock() - self.activity_monitor.progressed_at
            if silence_s < self._silence_s:
                self._limit_s = self._silence_s
            if silence_s >= self._limit_s:
                self._limit_s *= 2
                await self._report()
            else:
                await asyncio.sleep(self._limit_s - silence_s)

    async def _report(self) -> None:
        last_event, silent_since = self.activity_monitor.last_event, self.activity_monitor.progressed_at
        healths = await self._pool.health()
        now = asyncio.get_running_loop().time()
        lines = [
            f"no progress for {now - silent_since:.0f} s; last: {last_event}",
            _counts(self.activity_monitor.activities, num_held_back=self._gate.num_waiting),
            *_longest_waits(self.activity_monitor.activities, now=now),
            *_server_lines(self._pool, healths),
        ]
        logger.warning("\n  ".join(lines))


def timed(trajectory: Trajectory, trace: Trace, *, lag: LagMonitor) -> Trajectory:
    """Return the trajectory with its trace, and with the event loop's lag up to its end."""
    output = trajectory.output
    if lag.max_s > 0.0:
        output = output.measured(
            output.metrics.with_lag(max_s=lag.max_s, mean_s=lag.mean_s, late_share=lag.late_share)
        )
    return trajectory.watched(trace, output=output)


def _counts(activities: Sequence[Activity], *, num_held_back: int) -> str:
    """Return a line with the number of trajectories, in total and by what they wait for."""
    kinds = Counter(
        str(kind) for activity in activities for kind in {wait.kind for wait in activity.waits} or [OWN_CODE]
    )
    waits = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "none"
    held = f"; {num_held_back} more have not started (rollout.max_concurrent)" if num_held_back else ""
    return f"{len(activities)} trajectories in flight, by what they wait for: {waits}{held}"


def _longest_waits(activities: Sequence[Activity], *, now: float) -> list[str]:
    """Return one line for each of the trajectories that have waited longest."""
    ordered = sorted(
        activities, key=lambda activity: min([w.since for w in activity.waits] or [activity.since])
    )
    lines = [f"{activity.trajectory_id}: {_waits_of(activity, now=now)}" for activity in ordered[:MAX_LISTED]]
    if len(ordered) > MAX_LISTED:
        lines.append(f"and {len(ordered) - MAX_LISTED} more")
    return lines


def _waits_of(activity: Activity, *, now: float) -> str:
    if not activity.waits:
        return f"{OWN_CODE} for {now - activity.since:.0f} s (no request, tool or reward is in flight)"
    return ", ".join(f"{wait} for {now - wait.since:.0f} s" for wait in activity.waits)


def _server_lines(pool: ServerPool, healths: Sequence[ServerHealth]) -> list[str]:
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
