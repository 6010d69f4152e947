"""How the servers of a pool are."""

from __future__ import annotations

from typing import Literal

from agent_loop.completions.replies import Reply
from agent_loop.servers.manager import AsyncLLMServerManager


class ServerReply(Reply):
    """One server."""

    name: str
    is_alive: bool
    num_running: int
    num_waiting: int
    weight_version: int
    detail: str
    """Why it is not alive."""


class HealthReply(Reply):
    """The answer of `/health`; with `down`, the status is 503."""

    status: Literal["ok", "down"]
    servers: list[ServerReply]


async def health_of(pool: AsyncLLMServerManager) -> HealthReply:
    """Asks all servers of a pool; one that does not say is not alive."""
    replies = [
        ServerReply(
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
    return HealthReply(status="ok" if is_ok else "down", servers=replies)
