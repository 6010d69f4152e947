"""What a pool that is served does, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agent_loop.serving.health import ServerReply

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROMPT_TOKENS = ("agent_loop_prompt_tokens", "Tokens of prompts.")
COMPLETION_TOKENS = ("agent_loop_completion_tokens", "Tokens sampled.")
RUNNING = ("agent_loop_running", "Completions in the engine's batch.")
WAITING = ("agent_loop_waiting", "Completions that wait for a place in it.")
ALIVE = ("agent_loop_server_alive", "1 for a server that works.")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("agent_loop_requests", "Requests, by answer.", ["route", "status"], **own)
        self.duration = Histogram(
            "agent_loop_request_duration_seconds",
            "From a request to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            **own,
        )
        self.first_token = Histogram(
            "agent_loop_time_to_first_token_seconds",
            "From a streamed completion's start to its first token.",
            buckets=SECONDS,
            **own,
        )
        self.prompt_tokens = Counter(*PROMPT_TOKENS, **own)
        self.completion_tokens = Counter(*COMPLETION_TOKENS, **own)
        self._running = Gauge(*RUNNING, ["server"], **own)
        self._waiting = Gauge(*WAITING, ["server"], **own)
        self._is_alive = Gauge(*ALIVE, ["server"], **own)

    def render(self, servers: Sequence[ServerReply]) -> bytes:
        """The text format, with how full the servers are."""
        for server in servers:
            self._running.labels(server.name).set(server.num_running)
            self._waiting.labels(server.name).set(server.num_waiting)
            self._is_alive.labels(server.name).set(int(server.is_alive))
        return generate_latest(self.registry)
