"""Helpers that run an example with its own configuration and a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_loop.config import load_config
from agent_loop.rewards.function import load_reward
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.trajectory import Trajectory
from tests.helpers import hermes_template, small_tokenizer


def run_scripted(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    script: Callable[[ScriptedRequest], ScriptedReply],
    *,
    overrides: Sequence[str] = (),
) -> list[Trajectory]:
    """Run each row once, and return the trajectories."""
    config = load_config(folder / "config.yaml", overrides=["rollout.engine=scripted", *overrides])
    reward = config.reward.function
    assert reward is not None

    async def roll_out() -> list[Trajectory]:
        manager = AgentLoopManager(
            config.rollout,
            servers=[ScriptedServer(script)],
            template=hermes_template(),
            reward=load_reward(reward, timeout_s=5.0),
        )
        async with manager:
            return await manager.run(rows, n=1)

    return asyncio.run(roll_out())


def context_of(request: ScriptedRequest) -> str:
    """Return the text of a request's prompt."""
    return small_tokenizer().decode(request.prompt_ids.tolist(), skip_special_tokens=False)
