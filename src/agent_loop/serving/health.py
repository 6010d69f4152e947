"""How the servers of a pool are."""

from __future__ import annotations

from typing import Literal

from agent_loop.completions.response_models import ResponseModel
from agent_loop.servers.manager import AsyncLLMServerManager


class ServerHealthResponse(ResponseModel):
    """One server."""

    name: str
    is_alive: bool
    num_running: int
    num_waiting: int
    weight_version: int
    detail: str
    """Why it is not alive."""


class HealthResponse(ResponseModel):
    """The answer of `/health`; with `down`, the status is 503."""

    status: Literal["ok", "down"]
    servers: list[ServerHealthResponse]


async def health_of(pool: AsyncLLMServerManager) -> HealthResponse:
    """Asks all servers of a pool; one that does not say is not alive."""
    replies = [
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
    is_ok = all(reply.is_alive for reply in replies)
    return HealthResponse(status="ok" if is_ok else "down", servers=replies)
