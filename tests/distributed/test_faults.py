"""Faults cost time and no data: each row ends once, with the same tokens, when processes are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.trajectory import Trajectory
from tests.distributed.cluster import ClusterHarness, cluster_of
from tests.distributed.project import OTHER_PROJECTS, make_config, make_project, rows, set_latency

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), OTHER_PROJECTS]
NUM_ROWS = 512


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def expected(project: Path) -> dict[tuple[Any, ...], Any]:
    """Results of the rows in one process without faults."""

    async def main() -> list[Trajectory]:
        config = make_config(project, runtime="local", script="answer")
        async with AgentLoopManager.from_config(config) as manager:
            return await manager.run(rows(NUM_ROWS))

    return dict(map(id_and_tokens, asyncio.run(main())))


@pytest.fixture(scope="module")
def harness(project: Path) -> Generator[ClusterHarness]:
    config = make_config(project)
    with cluster_of(3) as cluster, ClusterHarness(config, folder=project, cluster=cluster) as harness:
        yield harness


def id_and_tokens(trajectory: Trajectory) -> tuple[tuple[int, int], Any]:
    """Return group and rollout of a trajectory, and its tokens, stop reason and reward."""
    output = trajectory.output
    assert output.failure is None, output.failure
    assert output.response_logprobs is not None
    tokens = (
        output.prompt_ids.tobytes(),
        output.response_ids.tobytes(),
        output.response_mask.tobytes(),
        output.response_logprobs.tobytes(),
    )
    return (trajectory.group, trajectory.rollout), (*tokens, str(output.stop_reason), trajectory.reward)


def run_and_compare(harness: ClusterHarness, expected: dict[tuple[Any, ...], Any], **fault: Any) -> None:
    set_latency(harness.folder, 0.3)
    trajectories = harness.runner.run(harness.run(rows(NUM_ROWS), **fault))
    assert [id_and_tokens(trajectory)[0] for trajectory in trajectories] == list(expected)
    assert dict(map(id_and_tokens, trajectories)) == expected
    held = harness.runner.run(harness.held())
    assert held
    assert not any(held.values()), held


def test_a_rollout_on_a_cluster_has_the_tokens_of_one_process(harness: ClusterHarness, expected: Any) -> None:
    run_and_compare(harness, expected)


@pytest.mark.parametrize("fault", ["kill_server", "kill_worker", "kill_node"])
def test_rows_of_killed_processes_are_resumed(harness: ClusterHarness, expected: Any, fault: str) -> None:
    run_and_compare(harness, expected, breaks=getattr(harness, fault), after=100)


def test_killed_processes_are_restarted_and_used_again(harness: ClusterHarness, expected: Any) -> None:
    harness.runner.run(harness.recovered())
    run_and_compare(harness, expected)
    assert harness.is_whole
    pids = {t.reward_extra["pid"] for t in harness.runner.run(harness.run(rows(NUM_ROWS)))}
    assert len(pids) == 4
