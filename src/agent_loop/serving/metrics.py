"""Prometheus metrics of a pool behind `agent-loop serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agent_loop.servers.metric_names import ALIVE, COMPLETION_TOKENS, PROMPT_TOKENS, RUNNING, WAITING
from agent_loop.serving.health import ServerHealthResponse

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Metrics of one application, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "agent_loop_requests", "Requests, by route and status.", ["route", "status"], **own
        )
        self.duration = Histogram(
            "agent_loop_request_duration_seconds",
            "Time from the start of a request to the end of its response.",
            ["route"],
            buckets=BUCKETS_S,
            **own,
        )
        self.first_token = Histogram(
            "agent_loop_time_to_first_token_seconds",
            "Time from the start of a streamed completion to its first token.",
            buckets=BUCKETS_S,
            **own,
        )
        self.prompt_tokens = Counter(*PROMPT_TOKENS, **own)
        self.completion_tokens = Counter(*COMPLETION_TOKENS, **own)
        self._running = Gauge(*RUNNING, ["server"], **own)
        self._waiting = Gauge(*WAITING, ["server"], **own)
        self._is_alive = Gauge(*ALIVE, ["server"], **own)

    def render(self, servers: Sequence[ServerHealthResponse]) -> bytes:
        """Return the metrics in Prometheus' text format, with the current load of the servers."""
        for server in servers:
            self._running.labels(server.name).set(server.num_running)
            self._waiting.labels(server.name).set(server.num_waiting)
            self._is_alive.labels(server.name).set(int(server.is_alive))
        return generate_latest(self.registry)
