"""Prometheus metrics of a pool behind `agent-loop serve`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agent_loop.serve.completions import ReplyChunk
from agent_loop.servers.metric_names import ALIVE, COMPLETION_TOKENS, PROMPT_TOKENS, RUNNING, WAITING
from agent_loop.servers.pool import ServerPool

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

    def observe(self, route: str, status: int, duration_s: float) -> None:
        """Count a request that has ended."""
        self.requests.labels(route, str(status)).inc()
        self.duration.labels(route).observe(duration_s)

    async def counted(
        self, chunks: AsyncGenerator[ReplyChunk], *, is_streamed: bool | None
    ) -> AsyncGenerator[ReplyChunk]:
        """Yield the chunks of a request, and count their tokens and those of their prompts."""
        started = time.perf_counter()
        begun: set[int] = set()
        async with aclosing(chunks):
            async for chunk in chunks:
                if is_streamed and not begun:
                    self.first_token.observe(time.perf_counter() - started)
                if chunk.index not in begun:
                    self.prompt_tokens.inc(len(chunk.head.prompt_ids))
                    begun.add(chunk.index)
                self.completion_tokens.inc(len(chunk.tokens.token_ids))
                yield chunk

    def render(self, servers: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the metrics in Prometheus' text format, with the current load of the servers."""
        for server in servers:
            self._running.labels(server["name"]).set(server["num_running"])
            self._waiting.labels(server["name"]).set(server["num_waiting"])
            self._is_alive.labels(server["name"]).set(int(server["is_alive"]))
        return generate_latest(self.registry)


async def health_of(pool: ServerPool) -> list[dict[str, Any]]:
    """Return the health and load of all servers of a pool. A server that does not respond is not alive."""
    return [
        {
            "name": server.name,
            "is_alive": health.is_alive,
            "num_running": health.num_running,
            "num_waiting": health.num_waiting,
            "weight_version": health.weight_version,
            "detail": health.detail,
        }
        for server, health in zip(pool.servers, await pool.health(), strict=True)
    ]
