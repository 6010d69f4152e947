"""Replay of one trajectory: run its row again with the recorded responses."""

from __future__ import annotations

from collections.abc import Sequence

from agent_loop.config import Config
from agent_loop.recording.recorded_responses import RecordedResponses
from agent_loop.recording.replay_log import ReplayLog
from agent_loop.rollout.components import (
    load_context,
    load_loops,
    load_reward_function,
    load_template,
    make_server_manager,
    make_worker,
)
from agent_loop.rollout.jobs import Job
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.factory import create_servers
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.trajectory import Trajectory


async def replay_trajectory(
    config: Config, trajectory: Trajectory, *, recorded: RecordedResponses, continue_live: bool
) -> list[Trajectory]:
    """Run a trajectory's row again, with the recorded responses of the model, the tools and the interaction."""
    template = load_template(config)
    servers: Sequence[AsyncServerBase] = (
        create_servers(config.model, rollout=config.rollout) if continue_live else [ScriptedServer([])]
    )
    manager = make_server_manager(config.rollout, servers, vocab_size=template.vocab_size)
    worker = make_worker(
        config.rollout,
        context=load_context(config.rollout, server_manager=manager, template=template, settings=config),
        loops=load_loops(config.rollout),
        reward=load_reward_function(config) if continue_live else None,
    )
    params = {name: getattr(config.rollout, name) for name in ("temperature", "top_p", "top_k")}
    log = ReplayLog(trajectory.trajectory_id, recorded, continue_live=continue_live)
    job = Job(trajectory.row, trajectory.group, trajectory.rollout, params, log=log)
    await manager.pool.start()
    try:
        await manager.pool.wake_up()
        return await worker.run([job])
    finally:
        await manager.pool.close()
