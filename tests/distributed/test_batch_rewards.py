"""Rewards of whole groups, whose rollouts run on several workers of a cluster, are computed by the driver."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from agent_loop.distributed.manager import ClusterManager
from agent_loop.errors import ConfigError
from agent_loop.trajectory import Trajectory
from tests.distributed.cluster import ClusterHarness
from tests.distributed.project import OTHER_PROJECTS, make_config, make_project, rows, set_latency

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), OTHER_PROJECTS]
N = 4

JUDGE = """
import json
import os
from pathlib import Path


def reward(outputs, rows):
    with open(Path(__file__).parent / "judged.log", "a") as log:
        log.write(json.dumps([row["number"] for row in rows]) + "\\n")
    return [
        {"reward": row["number"] + place / 10, "pid": os.getpid(), "answer": output.answer}
        for place, (output, row) in enumerate(zip(outputs, rows))
    ]
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Generator[ClusterHarness]:
    folder = make_project(tmp_path_factory.mktemp("project"))
    (folder / "judge.py").write_text(JUDGE, encoding="utf-8")
    config = make_config(folder, num_servers=2, num_workers=3)
    reward = config.reward.model_copy(update={"function": f"{folder}/judge.py:reward", "batch": True})
    with ClusterHarness(config.model_copy(update={"reward": reward}), folder=folder, cluster=None) as harness:
        yield harness


def judged(harness: ClusterHarness) -> list[list[int]]:
    """Return the rows of each call of the reward function since the last call of this helper."""
    log = harness.folder / "judged.log"
    lines = log.read_text().splitlines()
    log.unlink()
    return sorted(json.loads(line) for line in lines)


def assert_scored(trajectories: list[Trajectory], *, num_groups: int) -> None:
    assert [(t.group, t.rollout) for t in trajectories] == [
        (g, n) for g in range(num_groups) for n in range(N)
    ]
    assert [t.reward for t in trajectories] == [g + n / 10 for g in range(num_groups) for n in range(N)]
    assert all(t.reward_extra["answer"] == t.output.answer for t in trajectories)
    assert {t.reward_extra["pid"] for t in trajectories} == {os.getpid()}


def test_each_group_is_scored_by_one_call_in_the_driver(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 0.0)
    trajectories = harness.runner.run(harness.manager.run(rows(5), n=N))
    assert_scored(trajectories, num_groups=5)
    assert judged(harness) == [[n] * N for n in range(5)]
    assert not any(harness.runner.run(harness.held()).values())


def test_groups_stay_whole_when_a_worker_dies(harness: ClusterHarness) -> None:
    set_latency(harness.folder, 0.3)
    trajectories = harness.runner.run(harness.run(rows(8), n=N, breaks=harness.kill_worker, after=N))
    assert_scored(trajectories, num_groups=8)
    assert judged(harness) == [[n] * N for n in range(8)]
    harness.runner.run(harness.recovered())


def test_a_reward_function_with_a_wrong_signature_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(make_project(tmp_path))
    reward = config.reward.model_copy(update={"batch": True})
    with pytest.raises(ConfigError, match=r"it is called as \(outputs, rows\)"):
        ClusterManager(config.model_copy(update={"reward": reward}))
