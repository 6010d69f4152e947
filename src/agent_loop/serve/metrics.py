"""Prometheus metrics of a pool behind `agent-loop serve`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agent_loop.errors import BadPrompt
from agent_loop.serve.chat_replies import ResponseModel
from agent_loop.serve.sampling import Sampler
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.metric_names import ALIVE, COMPLETION_TOKENS, PROMPT_TOKENS, RUNNING, WAITING
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

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

    def render(self, servers: Sequence[ServerHealthResponse]) -> bytes:
        """Return the metrics in Prometheus' text format, with the current load of the servers."""
        for server in servers:
            self._running.labels(server.name).set(server.num_running)
            self._waiting.labels(server.name).set(server.num_waiting)
            self._is_alive.labels(server.name).set(int(server.is_alive))
        return generate_latest(self.registry)


class ServerHealthResponse(ResponseModel):
    """Health and load of one server."""

    name: str
    is_alive: bool
    num_running: int
    num_waiting: int
    weight_version: int
    detail: str
    """Reason why the server is not alive."""


class HealthResponse(ResponseModel):
    """Response of `/health`. The HTTP status is 503 if `status` is `down`."""

    status: Literal["ok", "down"]
    servers: list[ServerHealthResponse]


async def health_of(pool: AsyncLLMServerManager) -> HealthResponse:
    """Return the health of all servers of a pool. A server that does not respond is not alive."""
    servers = [
        ServerHealthResponse(
            name=server.name,
            is_alive=health.is_alive,
            num_running=health.num_running,
            num_waiting=health.num_waiting,
            weight_version=health.weight_version,
            detail=health.detail,
        )
        for server, health in zip(pool.servers, await pool.health(), strict=True)
    ]
    is_ok = all(server.is_alive for server in servers)
    return HealthResponse(status="ok" if is_ok else "down", servers=servers)


class MeteredSampler:
    """`Sampler` that refuses prompts which are too long, and updates metrics."""

    def __init__(self, sampler: Sampler, *, metrics: Metrics, max_model_len: int | None) -> None:
        self._sampler = sampler
        self._metrics = metrics
        self._max_model_len = max_model_len

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        self._check(prompt_ids)
        output = await self._sampler.generate(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
            attachments=attachments,
        )
        self._metrics.prompt_tokens.inc(len(prompt_ids))
        self._metrics.completion_tokens.inc(len(output.token_ids))
        return output

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        self._check(prompt_ids)
        started = time.perf_counter()
        has_first_chunk = False
        chunks = self._sampler.stream(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
            attachments=attachments,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                if not has_first_chunk:
                    self._metrics.prompt_tokens.inc(len(prompt_ids))
                    self._metrics.first_token.observe(time.perf_counter() - started)
                    has_first_chunk = True
                self._metrics.completion_tokens.inc(len(chunk.token_ids))
                yield chunk

    def end_session(self, request_id: str) -> None:
        self._sampler.end_session(request_id)

    def _check(self, prompt_ids: IntArray) -> None:
        longest = self._max_model_len
        if longest is not None and len(prompt_ids) >= longest:
            raise BadPrompt(
                f"the prompt has {len(prompt_ids)} tokens, but the limit is {longest - 1}, because the context of "
                f"{longest} tokens must have room for a sampled token; shorten the prompt"
            )
