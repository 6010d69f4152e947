"""Monitor of the trajectories of one worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agent_loop.rollout.event_loop_lag import LagMonitor
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.watchdog import Watchdog
from agent_loop.runtime.activity import ActivityMonitor
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Trace, Trajectory


class TrajectoryMonitor:
    """Observes trajectories while they run: a watchdog, and the event loop's lag.

    Args:
        gate: Admits the trajectories.
        pool: The servers.
        silence_s: Seconds without progress after which the watchdog warns. None disables the watchdog.
    """

    def __init__(self, *, gate: AdmissionGate, pool: ServerPool, silence_s: float | None) -> None:
        self.activity_monitor = ActivityMonitor()
        self._lag = LagMonitor(self.activity_monitor)
        self._watchdog = Watchdog(self.activity_monitor, gate=gate, pool=pool, silence_s=silence_s)

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Monitor the trajectories that run in the body. Several such contexts may overlap."""
        with self._lag.measuring():
            async with running_in_background(self._watchdog.watch()):
                yield

    def timed(self, trajectory: Trajectory, trace: Trace) -> Trajectory:
        """Return the trajectory with its trace, and with the event loop's lag up to its end."""
        lag = self._lag.lag
        output = trajectory.output
        if lag.max_s > 0.0:
            output = output.measured(
                output.metrics.with_lag(max_s=lag.max_s, mean_s=lag.mean_s, late_share=lag.late_share)
            )
        return trajectory.watched(trace, output=output)
