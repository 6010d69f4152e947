"""Manager on a local cluster: rollouts, cancellation, restarts, and cleanup."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_loop.config import load_config
from agent_loop.distributed import create_manager
from agent_loop.distributed.manager import ClusterManager
from agent_loop.errors import BadPrompt
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import Ability
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import SamplingParams, StopReason, as_token_ids
from tests.cli.project import make_project as make_model_project
from tests.distributed.cluster import ClusterHarness, ray
from tests.distributed.project import OTHER_PROJECTS, make_config, make_project, rows, set_latency
from tests.helpers import hermes_template, user
from tests.listeners import is_loopback, listening_addresses, process_tree

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), OTHER_PROJECTS]

ONCE = '''
from pathlib import Path
from agent_loop import function_tool


@function_tool(on_replay="once")
async def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: First.
        b: Second.
    """
    with open(Path(__file__).parent / "calls.log", "a") as file:
        file.write(f"{a} {b}\\n")
    return a + b
'''


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Generator[ClusterHarness]:
    folder = make_project(tmp_path_factory.mktemp("project"))
    config = make_config(folder, num_servers=2, num_workers=2, max_row_restarts=1)
    with ClusterHarness(config, folder=folder, cluster=None) as harness:
        yield harness
    assert not ray.is_initialized()


def held(harness: ClusterHarness) -> dict[str, int]:
    return {name: count for name, count in harness.runner.run(harness.held()).items() if count}


def test_a_cluster_that_the_run_starts_listens_on_loopback_only(harness: ClusterHarness) -> None:
    addresses = listening_addresses(process_tree(os.getpid()))
    assert len(addresses) > 4
    assert all(map(is_loopback, addresses)), addresses


def test_a_server_in_another_process_scores_texts(harness: ClusterHarness) -> None:
    server = harness.manager.remote_servers[0]
    assert Ability.SCORE in server.abilities
    scores = harness.runner.run(server.score(as_token_ids([5, 8, 9]), start=2))
    assert scores.logprobs.tolist() == [-2.5]
    with pytest.raises(BadPrompt, match="start is 4"):
        harness.runner.run(server.score(as_token_ids([5, 8, 9]), start=4))


def test_a_control_call_is_answered_while_thousands_of_completions_hang(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 3600.0)
    server = harness.manager.remote_servers[0]
    prompt = hermes_template().open(user("number 1?"))

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            hanging = [
                group.create_task(server.generate(prompt, SamplingParams(), f"hangs-{n}"))
                for n in range(5000)
            ]
            while (await server.health()).num_running < 5000:
                pass
            asked = clock()
            await server.health()
            answered = clock()
            for task in hanging:
                task.cancel()
        for n in range(5000):
            server.end_session(f"hangs-{n}")
        await server.flush(is_lost=False)
        while (await server.health()).num_running:
            pass
        return answered - asked

    assert harness.runner.run(main()) < 2
    assert not held(harness)


def test_a_cancelled_batch_of_a_thousand_rows_is_cleaned_up_before_the_next(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 3600.0)

    async def num_running() -> int:
        return sum(health.num_running for health in await harness.manager.server_manager.pool.health())

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            running = group.create_task(harness.manager.run(rows(1000)))
            while await num_running() < 1000:
                pass
            cancelled = clock()
            running.cancel()
            await asyncio.wait({running})
        while await num_running():
            pass
        return clock() - cancelled

    seconds = harness.runner.run(main())
    assert seconds < 30
    assert not held(harness)
    set_latency(harness.folder, 0.0)
    assert {t.output.stop_reason for t in harness.runner.run(harness.run(rows(20)))} == {StopReason.ANSWERED}


def test_one_trajectory_can_be_cancelled(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 0.5)

    async def cancel() -> None:
        assert harness.manager.cancel("group=7/rollout=0")

    work = rows(8)
    trajectories = harness.runner.run(harness.run(work, breaks=cancel))
    assert [t.group for t in trajectories if t.output.stop_reason is StopReason.CANCELLED] == [7]
    assert not harness.manager.cancel("group=7/rollout=0")


def test_the_first_groups_are_kept_and_the_others_cancelled(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 0.1)
    trajectories = harness.runner.run(harness.manager.run(rows(12), n=2, num_groups=4))
    assert len(trajectories) == 8
    assert len({t.group for t in trajectories}) == 4
    assert not held(harness)


def test_branches_stay_together_and_an_unstorable_value_is_an_incident(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 0.0)
    work = rows(6)
    work[2]["agent_name"], work[4]["agent_name"] = "two_ways", "returns_a_function"
    trajectories = harness.runner.run(harness.run(work))
    branches = [(t.group, t.branch) for t in trajectories]
    assert branches == [(0, None), (1, None), (2, 0), (2, 1), (3, None), (4, None), (5, None)]
    assert [t.output.failure for t in trajectories] == [None] * 7
    incidents = {t.group: i.detail for t in trajectories for i in t.output.incidents}
    assert set(incidents) == {4}
    assert "a_function is not storable" in incidents[4]
    assert [t.row for t in trajectories if t.group == 2] == [work[2], work[2]]


def test_a_row_that_kills_its_workers_fails_and_the_others_do_not(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 0.0)
    work = rows(8)
    work[3]["agent_name"] = "kills_its_worker"
    trajectories = harness.runner.run(harness.run(work))
    assert [t.group for t in trajectories] == list(range(8))
    [(group, failure)] = [(t.group, t.output.failure) for t in trajectories if t.output.failure is not None]
    assert group == 3
    assert "workers died while they ran this row, the last one without other rows" in failure.error
    assert not held(harness)


def test_rows_wait_for_the_servers_to_restart_when_all_are_killed_at_once(harness: ClusterHarness) -> None:
    async def kill_all() -> None:
        await run_together(harness.kill_server(index) for index in range(2))

    set_latency(harness.folder, 0.3)
    for _ in range(2):
        trajectories = harness.runner.run(harness.run(rows(32), breaks=kill_all, after=8))
        found = [(t.group, t.output.failure, t.reward) for t in trajectories]
        assert found == [(number, None, float(number)) for number in range(32)]
    assert not held(harness)


def test_a_tool_that_runs_once_is_not_run_again_when_its_worker_dies(tmp_path: Path) -> None:
    """Without a journal: another worker resumes the rows from what the dead one recorded."""
    folder = make_project(tmp_path)
    set_latency(folder, 0.2)
    (folder / "once.py").write_text(ONCE, encoding="utf-8")
    config = make_config(folder, num_servers=1, num_workers=2, tools=f"{folder}/once.py:add")

    def calls() -> list[str]:
        log = folder / "calls.log"
        return log.read_text().splitlines() if log.exists() else []

    async def kill_in_the_middle() -> None:
        while len(calls()) < 40:  # noqa: ASYNC110  (other processes write it)
            await asyncio.sleep(0.02)
        await new_harness.kill_worker()

    with ClusterHarness(config, folder=folder, cluster=None) as new_harness:
        trajectories = new_harness.runner.run(new_harness.run(rows(32), breaks=kill_in_the_middle))
    assert {t.output.stop_reason for t in trajectories} == {StopReason.ANSWERED}
    assert set(Counter(calls()).values()) == {1}
    # A call that was recorded and may not have begun is not made either. Its row has an incident.
    kinds = Counter(incident.kind for t in trajectories for incident in t.output.incidents)
    assert 32 * 3 - kinds[IncidentKind.INTERRUPTED_CALL] <= len(calls()) <= 32 * 3


def test_a_killed_engine_restarts_with_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = make_model_project(tmp_path)
    overrides = [
        "rollout.n=1",
        "rollout.temperature=0",
        "rollout.num_servers=2",
        "rollout.agent.num_workers=2",
        "trainer.ray.num_cpus_per_server=0.01",
        "trainer.ray.num_cpus_per_worker=0.01",
        "rollout.free_cache_engine=false",
        "rollout.engine_kwargs.num_threads=1",
    ]
    weights = changed_weights(tmp_path / "model")
    work = [{"raw_prompt": user(f"question {n}")} for n in range(24)]

    async def reference() -> list[Any]:
        async with AgentLoopManager.from_config(load_config(path, overrides=overrides)) as manager:
            before = tokens_of(await manager.run(work))
            await manager.update_weights(weights, weight_version=1)
            after = tokens_of(await manager.run(work))
            assert before != after
            return after

    async def on_the_cluster() -> list[Any]:
        config = load_config(path, overrides=[*overrides, "trainer.runtime=ray"])
        manager = create_manager(config)
        assert isinstance(manager, ClusterManager)
        async with manager:
            await manager.update_weights(weights, weight_version=1)
            pid = await manager.remote_servers[0].actor.__ray_call__.remote(lambda _: os.getpid())
            os.kill(pid, 9)
            first = tokens_of(await manager.run(work))
            while {health.weight_version for health in await manager.server_manager.pool.health()} != {1}:
                await manager.run(work[:1])
            assert tokens_of(await manager.run(work)) == first
            return first

    assert asyncio.run(on_the_cluster()) == asyncio.run(reference())


def changed_weights(model: Path) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(1)
    state = AutoModelForCausalLM.from_pretrained(model).state_dict()
    return [
        (name, weight + 0.5 * torch.randn_like(weight))
        for name, weight in state.items()
        if name != "lm_head.weight"
    ]


def tokens_of(trajectories: list[Trajectory]) -> list[Any]:
    return [
        (t.trajectory_id, t.output.response_ids.tolist(), t.output.weight_versions.tolist())
        for t in trajectories
    ]
