"""Runs single rows again with what was answered the first time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.config import Config
from agent_loop.recording.rehearsal import Rehearsal
from agent_loop.recording.spoken import Spoken
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
from agent_loop.trajectory import AgentLoopOutput, Trajectory


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two trajectories differ."""

    place: int
    """From the first token of the prompt."""
    old: tuple[int, ...]
    """The tokens from there on, at most `SHOWN_TOKENS`; none where the trajectory is over."""
    new: tuple[int, ...]
    where: str
    """The segment of the old one, as in `tool tokens after assistant turn 2`."""


SHOWN_TOKENS = 12


async def rehearse(
    config: Config, trajectory: Trajectory, *, spoken: Spoken, goes_on: bool
) -> list[Trajectory]:
    """Runs a trajectory's row again.

    Args:
        config: With its loop, template and tools, and where it goes on its server and reward.
        trajectory: The finished one.
        spoken: What is answered as it was.
        goes_on: What is asked beyond that is really asked; otherwise nothing is, and nothing is scored. A batch
            reward function, which scores whole groups, is not called.

    Raises:
        ConfigError: Something that the configuration names does not exist.
    """
    template = load_template(config)
    servers: Sequence[AsyncServerBase] = (
        create_servers(config.model, rollout=config.rollout) if goes_on else [ScriptedServer([])]
    )
    manager = make_server_manager(config.rollout, servers, vocab_size=template.vocab_size)
    worker = make_worker(
        config.rollout,
        context=load_context(config.rollout, server_manager=manager, template=template, settings=config),
        loops=load_loops(config.rollout),
        reward=load_reward_function(config) if goes_on else None,
    )
    params = {name: getattr(config.rollout, name) for name in ("temperature", "top_p", "top_k")}
    log = Rehearsal(trajectory.trajectory_id, spoken, goes_on=goes_on)
    job = Job(trajectory.row, trajectory.group, trajectory.rollout, params, log=log)
    await manager.start()
    try:
        await manager.wake_up()
        return await worker.run([job])
    finally:
        await manager.close()


def first_difference(old: AgentLoopOutput, new: AgentLoopOutput) -> Difference | None:
    """Where two trajectories differ; None if all tokens are the same."""
    mine, its = ([*o.prompt_ids.tolist(), *o.response_ids.tolist()] for o in (old, new))
    place = next(
        (n for n, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), min(len(mine), len(its))
    )
    if place == len(mine) == len(its):
        return None
    shown = slice(place, place + SHOWN_TOKENS)
    return Difference(place, tuple(mine[shown]), tuple(its[shown]), _where(old, place))


def _where(output: AgentLoopOutput, place: int) -> str:
    turn, end = 0, 0
    for segment in output.segments:
        end += len(segment)
        turn += segment.weight_version is not None
        if place < end:
            return f"{segment.origin} tokens" + (f", assistant turn {turn}" if turn else "")
    return "behind its last token"
