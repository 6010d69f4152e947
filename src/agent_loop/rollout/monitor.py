"""Monitor of the trajectories of one worker: their traces, the event loop's lag, and reports of stalls."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from msgspec import structs

from agent_loop.rollout.gate import AdmissionGate
from agent_loop.runtime.activity import Activity, ActivityMonitor
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.servers.base import ServerHealth
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Trace, Trajectory

logger = logging.getLogger(__name__)

MAX_LISTED = 10
OWN_CODE = "the loop's own code"
TICK_S = 0.05
"""Seconds between two measurements. Shorter blocks are measured in part."""
LATE_S = 0.1
WARN_S = 1.0
REMEDY = (
    "all other trajectories wait while it is blocked; blocking code in an async tool, reward or loop is the usual "
    "cause: await it, or define the function with def, so that it runs in a thread. If the code is in agent_loop.chat, "
    "no tool, reward or loop is the cause: raise rollout.agent.num_workers, or use a fast tokenizer"
)


class TrajectoryMonitor:
    """Observes trajectories while they run.

    Logs what every trajectory waits for when there was no progress for `silence_s`, and again each time this period has
    doubled.
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


class LagMonitor:
    """Measures the lag in a `with` block, and warns about blocks that last longer than `WARN_S`.

    A thread logs the warning while the block lasts, with the line of code that blocks. It warns about the first block,
    and then about each block that is twice as long as the last one reported.
    """

    def __init__(self, activity_monitor: ActivityMonitor, *, warn_s: float = WARN_S) -> None:
        self.max_s = 0.0
        self._activity_monitor = activity_monitor
        self._limit_s = warn_s
        self._poll_s = warn_s / 4
        self._num_ticks = 0
        self._sum_s = self._late_s = 0.0
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._started = self._loop.time()
        self._set_timer()
        threading.Thread(target=self._watch, args=(thread_id,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._ended.set()

    @property
    def mean_s(self) -> float:
        """Mean lag since the measurement began."""
        return self._sum_s / max(self._num_ticks, 1)

    @property
    def late_share(self) -> float:
        """Share of the time in which the loop was blocked for more than `LATE_S` at once."""
        return self._late_s / max(self._loop.time() - self._started, TICK_S)

    def _set_timer(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(TICK_S, self._tick, self._loop.time() + TICK_S)

    def _tick(self, due: float) -> None:
        lag_s = max(self._loop.time() - due, 0.0)
        self._num_ticks += 1
        self._sum_s += lag_s
        self.max_s = max(self.max_s, lag_s)
        self._late_s += lag_s if lag_s > LATE_S else 0.0
        if (
            lag_s > self._limit_s
        ):  # the code that blocked held the interpreter's lock, so the thread did not run
            self._warn(lag_s, f"the last event before it was: {self._activity_monitor.last_event}")
        self._set_timer()

    def _watch(self, thread_id: int) -> None:
        """Look for blocks until the measurement ends. Run in a thread."""
        while not self._ended.wait(self._poll_s):
            blocked_s = time.monotonic() - self._beat_at - TICK_S
            frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]  (documented)
            is_idle = frame is None or frame.f_globals.get("__name__") == "selectors"
            if blocked_s > self._limit_s and not is_idle and self._loop.is_running():
                whose = self._activity_monitor.activity_of(asyncio.current_task(self._loop))
                stack = "".join(traceback.format_stack(frame)[-3:]).rstrip()
                self._warn(blocked_s, f"{f'by {whose}, ' if whose else ''}at\n{stack}")

    def _warn(self, lag_s: float, culprit: str) -> None:
        self._limit_s = 2 * lag_s
        logger.warning("the event loop was blocked for %.1f s, %s\n%s", lag_s, culprit, REMEDY)


def timed(trajectory: Trajectory, trace: Trace, *, lag: LagMonitor) -> Trajectory:
    """Return the trajectory with its trace, and with the event loop's lag up to its end."""
    output = trajectory.output
    if lag.max_s > 0.0:
        metrics = structs.replace(
            output.metrics,
            event_loop_lag_max=lag.max_s,
            event_loop_lag_mean=lag.mean_s,
            event_loop_late_share=lag.late_share,
        )
        output = output.measured(metrics)
    return structs.replace(trajectory, trace=trace, output=output)


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
