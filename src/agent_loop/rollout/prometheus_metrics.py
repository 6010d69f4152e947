"""Prometheus metrics of a rollout: servers, balancer, trajectories, tools and traces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent_loop.errors import ConfigError
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.runtime.activity import WaitKind
from agent_loop.servers.metric_names import ALIVE, COMPLETION_TOKENS, PROMPT_TOKENS, RUNNING, WAITING
from agent_loop.servers.pool import ServerPool
from agent_loop.tracing.tracer import TrajectoryCallback
from agent_loop.trajectory import Trajectory


class RolloutMetrics(Collector):
    """Counts finished trajectories, and reads the state of servers and trajectories on each scrape."""

    def __init__(
        self,
        pool: ServerPool,
        *,
        gate: AdmissionGate | None,
        num_dropped: Callable[[], Mapping[str, int]],
    ) -> None:
        self.port = 0
        """Port of the endpoint; 0 before `start`."""
        self._pool = pool
        self._gate = gate
        """Gate of the worker in this process. None if workers elsewhere have gates and balancers of their own."""
        self._num_dropped = num_dropped
        self._num_unfinished = 0
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        own: dict[str, Any] = {"registry": self.registry}
        self._ended = Counter(
            "agent_loop_trajectories_ended", "Trajectories that ended, by reason.", ["stop_reason"], **own
        )
        self._incidents = Counter(
            "agent_loop_incidents", "Incidents of trajectories, by kind.", ["kind"], **own
        )
        self._tool_calls = Counter("agent_loop_tool_calls", "Tool calls.", ["tool"], **own)
        self._spans = Counter("agent_loop_spans", "Waits of trajectories, by kind.", ["kind"], **own)
        self._span_seconds = Counter(
            "agent_loop_span_seconds", "Seconds that trajectories waited, by kind.", ["kind"], **own
        )
        self._prompt_tokens = Counter(*PROMPT_TOKENS, **own)
        self._cached_tokens = Counter(
            "agent_loop_cached_prompt_tokens", "Prompt tokens found in the servers' prefix caches.", **own
        )
        self._completion_tokens = Counter(*COMPLETION_TOKENS, **own)

    def start(self, *, host: str, port: int) -> None:
        """Serve `/metrics` from a thread."""
        try:
            self._server = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"rollout.metrics_port is {port} at {host}: {error}; give another port, or 0 for any free port"
            ) from error
        self.port = self._server[0].server_port

    def close(self) -> None:
        """Stop the endpoint. Do nothing if it was not started."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None

    @contextmanager
    def counting(
        self, num_trajectories: int, *, then: TrajectoryCallback | None
    ) -> Generator[TrajectoryCallback]:
        """Count trajectories as in flight. Yield a callback that counts each as ended and passes it to `then`."""
        left = num_trajectories
        self._num_unfinished += num_trajectories

        def count_and_pass_on(trajectory: Trajectory) -> None:
            nonlocal left
            self.count(trajectory)
            if not trajectory.branch:
                left -= 1
                self._num_unfinished -= 1
            if then is not None:
                then(trajectory)

        try:
            yield count_and_pass_on
        finally:
            self._num_unfinished -= left

    def count(self, trajectory: Trajectory) -> None:
        """Count a finished trajectory. Spans that branches share are counted once."""
        self._ended.labels(str(trajectory.output.stop_reason)).inc()
        for incident in trajectory.output.incidents:
            self._incidents.labels(str(incident.kind)).inc()
        if trajectory.trace is None or trajectory.branch:
            return
        for span in trajectory.trace.spans:
            self._spans.labels(str(span.kind)).inc()
            self._span_seconds.labels(str(span.kind)).inc(span.seconds)
            if span.kind == WaitKind.TOOL:
                self._tool_calls.labels(span.name).inc()
            elif span.kind == WaitKind.GENERATE:
                self._prompt_tokens.inc(span.details.get("num_prompt_tokens") or 0)
                self._cached_tokens.inc(span.details.get("num_cached_tokens") or 0)
                self._completion_tokens.inc(span.details.get("num_tokens") or 0)

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics. Called by Prometheus' client in a thread of the endpoint."""
        yield from self._server_metrics()
        if self._gate is not None:
            yield from self._balancer_metrics()
        num_held_back = 0 if self._gate is None else self._gate.num_waiting
        yield _gauge(
            "agent_loop_trajectories",
            "Trajectories in flight, and trajectories held back by rollout.max_concurrent.",
            {"in_flight": self._num_unfinished - num_held_back, "held_back": num_held_back},
            label="state",
        )
        dropped = CounterMetricFamily(
            "agent_loop_traces_dropped",
            "Trajectories whose trace was not written, by writer.",
            labels=["writer"],
        )
        for writer, count in self._num_dropped().items():
            dropped.add_metric([writer], count)
        yield dropped

    def _server_metrics(self) -> Iterable[Metric]:
        pool = self._pool
        names = [server.name for server in pool.servers]
        healths = {name: pool.healths[name] for name in names if name in pool.healths}
        yield _gauge(*ALIVE, {name: int(name not in pool.lost) for name in names})
        yield _gauge(*RUNNING, {name: health.num_running for name, health in healths.items()})
        yield _gauge(*WAITING, {name: health.num_waiting for name, health in healths.items()})
        yield _gauge(
            "agent_loop_kv_cache_share",
            "Share of the KV cache that running requests use, for servers that report it.",
            {name: h.kv_cache_share for name, h in healths.items() if h.kv_cache_share is not None},
        )
        yield _gauge(
            "agent_loop_weight_version",
            "Version of the weights that the server samples from.",
            {name: health.weight_version for name, health in healths.items()},
        )
        yield GaugeMetricFamily(
            "agent_loop_servers_lost",
            "Servers that receive no requests because they failed.",
            value=len(pool.lost),
        )

    def _balancer_metrics(self) -> Iterable[Metric]:
        balancer = self._pool.balancer
        yield _gauge("agent_loop_in_flight", "Requests that hold a lease on a server.", balancer.in_flight)
        yield GaugeMetricFamily(
            "agent_loop_waiting_for_place",
            "Requests that wait for a lease on any server.",
            value=balancer.num_queued,
        )
        yield GaugeMetricFamily(
            "agent_loop_sessions", "Sessions that are assigned to a server.", value=balancer.num_sessions
        )
        yield CounterMetricFamily(
            "agent_loop_failovers",
            "Requests whose server failed while they ran.",
            value=self._pool.num_failovers,
        )


def _gauge(name: str, help_text: str, values: Mapping[str, float], *, label: str = "server") -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for which, value in values.items():
        family.add_metric([which], value)
    return family
