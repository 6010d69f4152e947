"""What looks after the trajectories of one worker while they run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agent_loop.rollout.event_loop_lag import LagMonitor
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.watchdog import Watchdog
from agent_loop.runtime.activity import Board
from agent_loop.runtime.concurrency import running_beside
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Trace, Trajectory


class TrajectoryMonitor:
    """The watchdog and the measure of the event loop's lag."""

    def __init__(self, *, gate: AdmissionGate, pool: ServerPool, silence_s: float | None) -> None:
        """Args: silence_s: Of the watchdog; None is no watchdog."""
        self.board = Board()
        self._lag = LagMonitor(self.board)
        self._watchdog = Watchdog(self.board, gate=gate, pool=pool, silence_s=silence_s)

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Looks after what runs meanwhile; may be open more than once at a time."""
        with self._lag.measuring():
            async with running_beside(self._watchdog.watch()):
                yield

    def timed(self, trajectory: Trajectory, trace: Trace) -> Trajectory:
        """The trajectory with what it waited for, and the event loop's lag up to its end."""
        lag = self._lag.lag
        output = trajectory.output
        if lag.max_s > 0.0:
            output = output.measured(
                output.metrics.with_lag(max_s=lag.max_s, mean_s=lag.mean_s, late_share=lag.late_share)
            )
        return trajectory.watched(trace, output=output)
