"""Resumption of rollouts whose trajectories were all cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.journal import open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.stages import split_resumed
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.instances import OnReplay
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import call_text, encoded, hermes_template, user
from tests.loops.partials import TOKEN_S, CallCounts, CountingTool, scripted_turns
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import key_of

COMPLETION = "This answer is long. " * 5
NUM_TOKENS = len(encoded(f"{COMPLETION}<|im_end|>"))
ROWS = [{"raw_prompt": user(f"question {n}")} for n in range(4)]


def make_manager(agent: str, **settings: Any) -> AgentLoopManager:
    servers = [
        ScriptedServer(scripted_turns([COMPLETION]), name=f"scripted-{n}", streams=True) for n in range(2)
    ]
    agent_config = AgentConfig(default_agent_loop=agent, num_workers=2)
    config = RolloutConfig(agent=agent_config, n=2, **settings)
    return AgentLoopManager(config, servers=servers, template=hermes_template())


async def run_for(manager: AgentLoopManager, seconds: float, **options: Any) -> list[Trajectory]:
    asyncio.get_running_loop().call_later(seconds, manager.cancel_all)
    return await manager.run(ROWS, **options)


@pytest.mark.parametrize("max_concurrent", [None, 1])
def test_a_batch_cancelled_for_new_weights_resumes_under_them(max_concurrent: int | None) -> None:
    manager = make_manager("partial_tool_agent", max_concurrent=max_concurrent)

    async def scenario() -> tuple[list[Trajectory], list[Trajectory]]:
        first = await run_for(manager, 20.5 * TOKEN_S)
        await manager.update_weights([], weight_version=1)
        return first, await manager.run(ROWS, earlier=first)

    first, second = run_virtual(scenario())
    lengths = [len(t.output.response_ids) for t in first]
    assert lengths == ([20] * 8 if max_concurrent is None else [20, 20, *[0] * 6])
    assert {t.output.stop_reason for t in first} == {StopReason.CANCELLED}
    assert {t.reward for t in first} == {None}
    for trajectory, length in zip(second, lengths, strict=True):
        assert trajectory.output.stop_reason is StopReason.ANSWERED
        assert trajectory.output.weight_versions.tolist() == [0] * length + [1] * (NUM_TOKENS - length)
    assert [(t.group, t.rollout) for t in second] == [(g, n) for g in range(4) for n in range(2)]


def test_a_run_that_begins_after_a_cancellation_is_not_cancelled() -> None:
    manager = make_manager("partial_tool_agent")

    async def scenario() -> list[Trajectory]:
        manager.cancel_all()
        return await manager.run(ROWS)

    assert {t.output.stop_reason for t in run_virtual(scenario())} == {StopReason.ANSWERED}


def test_finished_trajectories_are_returned_unchanged_and_reported() -> None:
    manager = make_manager("partial_tool_agent")

    async def scenario() -> tuple[list[Trajectory], list[Trajectory], list[Trajectory]]:
        whole, received = await manager.run(ROWS), list[Trajectory]()
        return whole, received, await manager.run(ROWS, earlier=whole, on_trajectory=received.append)

    whole, received, again = run_virtual(scenario())
    assert again == whole == received
    assert sum(len(server.requests) for server in manager.server_manager.pool.servers) == 8  # pyright: ignore


def test_trajectories_of_a_loop_that_cannot_be_resumed_start_again() -> None:
    manager = make_manager("single_turn_agent")

    async def scenario() -> tuple[list[Trajectory], list[Trajectory]]:
        first = await run_for(manager, 20.5 * TOKEN_S)
        await manager.update_weights([], weight_version=1)
        return first, await manager.run(ROWS, earlier=first)

    first, second = run_virtual(scenario())
    assert {len(t.output.response_ids) for t in first} == {20}
    assert {tuple(t.output.weight_versions.tolist()) for t in second} == {(1,) * NUM_TOKENS}


def test_a_resumed_row_that_is_killed_resumes_from_its_output_and_its_journal(tmp_path: Path) -> None:
    """Check that each call runs once in a row that is cancelled in its second turn and killed in its third."""
    turns = [call_text("book", a=1), call_text("book", a=2), "Both are done."]
    counts, path = CallCounts(), tmp_path / "journal"
    rows = [{"raw_prompt": user("What is to be done?")}]
    lengths = [len(encoded(f"{turn}<|im_end|>")) * TOKEN_S for turn in turns]

    def make_harness() -> WorkerHarness:
        tool = CountingTool("book", counts, on_replay=OnReplay.ONCE, latency_s=0.1)
        return WorkerHarness(scripted_turns(turns), tools=[tool], agent="partial_tool_agent")

    async def cancelled() -> list[Trajectory]:
        part = make_harness()
        asyncio.get_running_loop().call_later(lengths[0] + 1 + 10.5 * TOKEN_S, part.worker.cancel_all)
        return await part.worker.run([Job(rows[0], 0, 0, {})])

    async def resumed(earlier: list[Trajectory], *, killed_after_s: float | None) -> list[Trajectory]:
        part, is_time = make_harness(), asyncio.Event()
        async with open_journal(path, key=key_of(rows), rows=rows, resume=killed_after_s is None) as journal:
            _, jobs = split_resumed(journal.divide([Job(rows[0], 0, 0, {})])[1], earlier)
            if killed_after_s is None:
                return await part.worker.run(jobs)
            asyncio.get_running_loop().call_later(killed_after_s, is_time.set)
            with suppress(asyncio.CancelledError):
                await run_while(part.worker.run(jobs), condition=is_time.wait())
        return []

    earlier = run_virtual(cancelled())
    assert counts.ended == {"book": 1}
    run_virtual(resumed(earlier, killed_after_s=lengths[1] - 1))
    assert counts.ended == {"book": 2}
    [trajectory] = run_virtual(resumed(earlier, killed_after_s=None))
    assert counts.started == counts.ended == {"book": 2}
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.output.answer == "Both are done."
    assert not trajectory.output.incidents
