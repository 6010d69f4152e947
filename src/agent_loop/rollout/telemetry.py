"""Traces of a rollout, and its metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import RolloutConfig
from agent_loop.loading import import_extra
from agent_loop.rollout.workers import LocalWorkers, Workers
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.pool import ServerPool
from agent_loop.tracing.tracer import Tracer, TrajectoryCallback
from agent_loop.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_loop.rollout.prometheus_metrics import RolloutMetrics


class Telemetry:
    """Tracer and metrics server of one manager.

    Raises:
        ConfigError: A package that the configuration asks for is not installed.
    """

    def __init__(
        self, config: RolloutConfig, *, template: ChatTemplate, pool: ServerPool, workers: Workers
    ) -> None:
        self.tracing = Tracer(config, template=template)
        self._config = config
        local_workers = workers if isinstance(workers, LocalWorkers) else None
        self.metrics = None if config.metrics_port is None else self._make_metrics(pool, local_workers)

    def start(self) -> None:
        """Start the metrics server, if `rollout.metrics_port` is set.

        Raises:
            ConfigError: The port is taken.
        """
        if self.metrics is not None:
            self.metrics.start(host=self._config.metrics_host, port=self._config.metrics_port or 0)

    @contextmanager
    def counting(
        self, num_trajectories: int, *, then: TrajectoryCallback | None
    ) -> Generator[TrajectoryCallback | None]:
        """Yield a callback for trajectories that end, which counts each and passes it to `then`.

        Args:
            num_trajectories: Number of trajectories in flight when the context is entered.
            then: The next callback, if any.
        """
        if self.metrics is None:
            yield then
            return
        metrics = self.metrics
        with metrics.running(num_trajectories) as end_one:

            def count_and_pass_on(trajectory: Trajectory) -> None:
                metrics.count(trajectory)
                if not trajectory.branch:
                    end_one()
                if then is not None:
                    then(trajectory)

            yield count_and_pass_on

    async def close(self) -> None:
        """Wait for the writers of traces, for a bounded time."""
        await run_in_thread(self.tracing.close)
        if self.metrics is not None:
            await run_in_thread(self.metrics.close)

    def _make_metrics(self, pool: ServerPool, workers: LocalWorkers | None) -> RolloutMetrics:
        """Return the metrics.

        Args:
            workers: The workers, if they run in this process. Workers elsewhere have balancers of their own.
        """
        import_extra("prometheus_client", extra="prometheus", by="rollout.metrics_port")
        from agent_loop.rollout.prometheus_metrics import RolloutMetrics  # late: optional

        return RolloutMetrics(
            pool,
            gates=() if workers is None else workers.gates,
            has_balancer=workers is not None,
            num_dropped=self.tracing.num_dropped,
        )
