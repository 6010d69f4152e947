"""Tests of rollouts on tasks, in folders instead of containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.environments.harbor.solving import run_tasks, solve
from tests.environments.harbor.tasks import write_task

FOLDERS: dict[str, Any] = {"provider": "tests.environments.harbor.relocated:Relocated"}
JUDGES_THE_ANSWER = """\
#!/bin/sh
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write(folder: Path) -> None:
    write_task(folder)
    (folder / "tests/test.sh").write_text(JUDGES_THE_ANSWER)


def rewards(trajectories: list[Trajectory]) -> list[float | None]:
    return [trajectory.reward for trajectory in trajectories]


def test_an_agent_that_solves_the_task_with_its_shell_gets_the_reward_of_the_tests(tmp_path: Path) -> None:
    write(tmp_path / "answer")
    (trajectory,) = run_tasks(tmp_path, workspace=FOLDERS, command=solve)
    assert trajectory.reward == 1.0
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.output.metrics.num_tool_calls == 1


def test_an_agent_that_does_nothing_or_something_wrong_gets_0(tmp_path: Path) -> None:
    write(tmp_path / "answer")
    assert rewards(run_tasks(tmp_path, workspace=FOLDERS, command=None)) == [0.0]
    wrong = run_tasks(tmp_path, workspace=FOLDERS, command=lambda task: "echo 41 > answer.txt")
    assert rewards(wrong) == [0.0]


def test_an_agent_sees_neither_the_tests_nor_the_solution(tmp_path: Path) -> None:
    write(tmp_path / "answer")
    (trajectory,) = run_tasks(tmp_path, workspace=FOLDERS, command=lambda task: "find . | sort")
    (reply,) = [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]
    assert reply == "."


def test_a_bad_task_fails_alone_and_is_not_scored(tmp_path: Path) -> None:
    write(tmp_path / "a-bad-one")
    write(tmp_path / "good")
    (tmp_path / "a-bad-one/tests/test.sh").unlink()
    bad, good = run_tasks(tmp_path, workspace=FOLDERS, command=solve)
    assert (bad.reward, bad.output.stop_reason) == (None, StopReason.FAILED)
    assert bad.output.failure is not None
    assert "a-bad-one" in bad.output.failure.error
    assert good.reward == 1.0


def test_tests_that_run_after_the_deadline_may_take_their_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loop.rollout.worker.DEADLINE_GRACE_S", 0.1)
    write(tmp_path / "answer")
    (tmp_path / "answer/task.toml").write_text("[agent]\ntimeout_sec = 1.0\n")
    test = (tmp_path / "answer/tests/test.sh").read_text()
    (tmp_path / "answer/tests/test.sh").write_text(f"{test}\nsleep 1\n")
    (trajectory,) = run_tasks(tmp_path, workspace=FOLDERS, command=lambda task: f"{solve(task)}\nsleep 600")
    assert (trajectory.output.stop_reason, trajectory.reward) == (StopReason.DEADLINE, 1.0)
