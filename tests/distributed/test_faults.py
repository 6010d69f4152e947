"""Faults cost time, never data: the same tokens come out, each row once, whatever is killed."""

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

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), OTHER_PROJECTS]
NUM_ROWS = 512


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def expected(project: Path) -> dict[tuple[Any, ...], Any]:
    """What the rows give in one process, where nothing breaks."""

    async def main() -> list[Trajectory]:
        async with AgentLoopManager.from_config(
            make_config(project, runtime="local", script="answer")
        ) as manager:
            return await manager.run(rows(NUM_ROWS))

    return {facts(trajectory)[0]: facts(trajectory)[1] for trajectory in asyncio.run(main())}


@pytest.fixture(scope="module")
def harness(project: Path) -> Generator[ClusterHarness]:
    with (
        cluster_of(3) as cluster,
        ClusterHarness(make_config(project), folder=project, cluster=cluster) as harness,
    ):
        yield harness


def facts(trajectory: Trajectory) -> tuple[tuple[int, int], Any]:
    """Who it is, and every token of it."""
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
    assert [facts(trajectory)[0] for trajectory in trajectories] == list(expected)
    assert dict(map(facts, trajectories)) == expected
    held = harness.runner.run(harness.held())
    assert held
    assert not any(held.values()), held


def test_a_rollout_on_a_cluster_is_the_same_to_the_token(harness: ClusterHarness, expected: Any) -> None:
    run_and_compare(harness, expected)


def test_rows_of_a_killed_server_go_on_at_the_others(harness: ClusterHarness, expected: Any) -> None:
    run_and_compare(harness, expected, breaks=harness.kill_server, after=100)


def test_rows_of_a_killed_worker_are_run_again_by_the_others(harness: ClusterHarness, expected: Any) -> None:
    run_and_compare(harness, expected, breaks=harness.kill_worker, after=100)


def test_a_killed_node_takes_no_row_with_it(harness: ClusterHarness, expected: Any) -> None:
    run_and_compare(harness, expected, breaks=harness.kill_node, after=100)


def test_what_was_killed_takes_part_again(harness: ClusterHarness, expected: Any) -> None:
    harness.runner.run(harness.recovered())
    run_and_compare(harness, expected)
    assert harness.is_whole
    pids = {t.reward_extra["pid"] for t in harness.runner.run(harness.run(rows(NUM_ROWS)))}
    assert len(pids) == 4
