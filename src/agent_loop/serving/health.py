"""Health of the servers of a pool."""

from __future__ import annotations

from typing import Literal

from agent_loop.completions.response_models import ResponseModel
from agent_loop.servers.manager import AsyncLLMServerManager


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
