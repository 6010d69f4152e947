"""What a rollout does, for Prometheus: servers, balancer, trajectories, tools, traces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent_loop.errors import ConfigError
from agent_loop.runtime.waits import WaitKind
from agent_loop.servers.pool import ServerPool
from agent_loop.serving.metrics import ALIVE, COMPLETION_TOKENS, PROMPT_TOKENS, RUNNING, WAITING
from agent_loop.trajectory import Trajectory

SNAPSHOT_TIMEOUT_S = 2.0
"""A scrape that waits longer for the event loop gets what the one before it got."""


class Gate(Protocol):
    """Where trajectories wait before they begin."""

    @property
    def num_waiting(self) -> int: ...


class RolloutMetrics(Collector):
    """Counts what ended, and looks at servers and trajectories when Prometheus asks.

    Args:
        pool: The servers.
        gates: Of the workers of this process.
        has_balancer: Whether requests go through the balancer of this pool, and not through those of other processes.
        num_dropped: Traces that were not written, by writer.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        gates: Collection[Gate],
        has_balancer: bool,
        num_dropped: Callable[[], Mapping[str, int]],
    ) -> None:
        self.port = 0
        """Where it is served."""
        self._pool = pool
        self._gates = gates
        self._has_balancer = has_balancer
        self._num_dropped = num_dropped
        self._num_unfinished = 0
        self._snapshot: list[Metric] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        own: dict[str, Any] = {"registry": self.registry}
        self._ended = Counter(
            "agent_loop_trajectories_ended", "Trajectories that ended, by reason.", ["stop_reason"], **own
        )
        self._incidents = Counter("agent_loop_incidents", "Named losses of trajectories.", ["kind"], **own)
        self._tool_calls = Counter("agent_loop_tool_calls", "Calls of tools.", ["tool"], **own)
        self._spans = Counter("agent_loop_spans", "What trajectories waited for.", ["kind"], **own)
        self._span_seconds = Counter(
            "agent_loop_span_seconds", "Seconds that trajectories waited for it.", ["kind"], **own
        )
        self._prompt_tokens = Counter(*PROMPT_TOKENS, **own)
        self._cached_tokens = Counter(
            "agent_loop_cached_prompt_tokens", "Tokens of prompts that servers did not compute.", **own
        )
        self._completion_tokens = Counter(*COMPLETION_TOKENS, **own)

    def start(self, *, host: str, port: int) -> None:
        """Serves `/metrics` from a thread. Called on the event loop of the rollout.

        Raises:
            ConfigError: The port is taken.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._server = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"rollout.metrics_port is {port} at {host}: {error}; give another one, or 0 for any free one"
            ) from error
        self.port = self._server[0].server_port

    def close(self) -> None:
        """Does nothing if it was not started."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None

    @contextmanager
    def running(self, num_trajectories: int) -> Generator[Callable[[], None]]:
        """Counts trajectories as unfinished; call what it yields for each that ends."""
        left = num_trajectories
        self._num_unfinished += num_trajectories

        def end_one() -> None:
            nonlocal left
            left -= 1
            self._num_unfinished -= 1

        try:
            yield end_one
        finally:
            self._num_unfinished -= left

    def count(self, trajectory: Trajectory) -> None:
        """A trajectory ended. What its branches share is counted once."""
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

    def describe(self) -> Iterable[Metric]:
        """Of `Collector`: what there may be."""
        return self._look()

    def collect(self) -> Iterable[Metric]:
        """Of `Collector`: how things are. Called in a thread of the endpoint's."""
        if self._loop is None or self._loop.is_closed():
            return self._look()
        look = asyncio.run_coroutine_threadsafe(self._look_on_loop(), self._loop)
        try:
            self._snapshot = look.result(SNAPSHOT_TIMEOUT_S)
        except TimeoutError:
            look.cancel()
        return self._snapshot

    async def _look_on_loop(self) -> list[Metric]:
        return self._look()

    def _look(self) -> list[Metric]:
        balancer = [*self._of_balancer()] if self._has_balancer else []
        return [*self._of_servers(), *balancer, *self._of_trajectories(), self._of_traces()]

    def _of_servers(self) -> Iterable[Metric]:
        pool = self._pool
        names = [server.name for server in pool.servers]
        told = {name: pool.healths[name] for name in names if name in pool.healths}
        yield _gauge(*ALIVE, {name: int(name not in pool.lost) for name in names})
        yield _gauge(*RUNNING, {name: health.num_running for name, health in told.items()})
        yield _gauge(*WAITING, {name: health.num_waiting for name, health in told.items()})
        yield _gauge(
            "agent_loop_kv_cache_share",
            "Of the KV cache, what running requests hold; servers that say it.",
            {name: h.kv_cache_share for name, h in told.items() if h.kv_cache_share is not None},
        )
        yield _gauge(
            "agent_loop_weight_version",
            "Of the weights that a server samples from.",
            {name: health.weight_version for name, health in told.items()},
        )
        yield GaugeMetricFamily("agent_loop_servers_lost", "Servers that are left out.", value=len(pool.lost))

    def _of_balancer(self) -> Iterable[Metric]:
        balancer = self._pool.balancer
        yield _gauge("agent_loop_in_flight", "Requests that hold a place at a server.", balancer.in_flight)
        yield GaugeMetricFamily(
            "agent_loop_waiting_for_place",
            "Requests for which no server has a place.",
            value=balancer.num_waiting,
        )
        yield GaugeMetricFamily(
            "agent_loop_sessions", "Conversations that servers know.", value=balancer.num_sessions
        )
        yield CounterMetricFamily(
            "agent_loop_failovers",
            "Requests that lost their server while they ran.",
            value=self._pool.num_failovers,
        )

    def _of_trajectories(self) -> Iterable[Metric]:
        num_held_back = sum(gate.num_waiting for gate in self._gates)
        states = {"in_flight": self._num_unfinished - num_held_back, "held_back": num_held_back}
        yield _gauge(
            "agent_loop_trajectories",
            "Trajectories that run, and those that rollout.max_concurrent does not let begin.",
            states,
            label="state",
        )

    def _of_traces(self) -> Metric:
        family = CounterMetricFamily(
            "agent_loop_traces_dropped",
            "Trajectories that a writer of traces did not write.",
            labels=["writer"],
        )
        for writer, count in self._num_dropped().items():
            family.add_metric([writer], count)
        return family


def _gauge(name: str, help_text: str, values: Mapping[str, float], *, label: str = "server") -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for which, value in values.items():
        family.add_metric([which], value)
    return family
