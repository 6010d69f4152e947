"""Rollouts of code, settings and rows in verl's format, with a scripted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.config import Config, RolloutConfig
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.helpers import hermes_template, user

CONFIG = "tests/compat/config.yaml"
RULES = "agent_loop.integrations.verl.rules:default_compute_score"


def row(**columns: Any) -> dict[str, Any]:
    return {"raw_prompt": user("What is 6 * 7?"), **columns}


def run(
    config: Config | RolloutConfig,
    rows: Sequence[Row],
    *turns: ScriptedReply,
    n: int | None = 1,
    servers: Sequence[AsyncServerBase] = (),
    **options: Any,
) -> list[Trajectory]:
    """Run the rows. Each trajectory receives these completions, turn by turn."""
    rollout = config.rollout if isinstance(config, Config) else config

    async def main() -> list[Trajectory]:
        used = servers or [ScriptedServer(turns, name=f"server-{number}") for number in range(2)]
        async with AgentLoopManager(rollout, servers=used, template=hermes_template(), **options) as manager:
            return await manager.run(rows, n=n)

    return run_virtual(main())
