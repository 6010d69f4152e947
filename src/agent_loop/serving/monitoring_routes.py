"""Routes for health checks and metrics. They require no API key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from agent_loop.serving.health import HealthResponse, health_of
from agent_loop.serving.metrics import CONTENT_TYPE
from agent_loop.serving.pool_requests import PoolRequests
from agent_loop.serving.streams import json_response

UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"model": HealthResponse}}
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


class MonitoringRoutes:
    """Health and metrics."""

    def __init__(self, requests: PoolRequests) -> None:
        self._pool = requests.served.pool
        self._metrics = requests.metrics

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to a router."""
        router.get("/health", name="health", response_model=HealthResponse, responses=UNHEALTHY)(self._health)
        router.get("/metrics", name="metrics", response_class=Response, responses=TEXT)(self._metrics_text)

    async def _health(self) -> Response:
        """Report the health and load of each server."""
        health = await health_of(self._pool)
        return json_response(health, status=200 if health.status == "ok" else 503)

    async def _metrics_text(self) -> Response:
        """Return metrics for Prometheus."""
        health = await health_of(self._pool)
        return Response(self._metrics.render(health.servers), media_type=CONTENT_TYPE)
