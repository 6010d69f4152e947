"""Tests of tasks in real containers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_loop.checks import check_tasks
from tests.environments.harbor.solving import run_tasks, solve
from tests.environments.harbor.tasks import write_task

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "container": {
        "build_args": {"BASE_IMAGE": "localhost/agent-loop-base"},
        "build_options": ["--network=none"],
    }
}


def test_the_solution_of_every_example_scores_1_and_doing_nothing_scores_0() -> None:
    reports = asyncio.run(check_tasks(Path("examples/tasks"), settings=SETTINGS, concurrency=2))
    assert len(reports) == 5
    assert {report.name: report.problems for report in reports if not report.is_passed} == {}
    assert {(report.nothing, report.solution) for report in reports} == {(0.0, 1.0)}


def test_an_agent_with_a_shell_solves_every_example_and_one_without_calls_none() -> None:
    solved = run_tasks(Path("examples/tasks"), workspace=SETTINGS, command=solve)
    assert {str(t.row["task"]): t.reward for t in solved} == {str(t.row["task"]): 1.0 for t in solved}
    idle = run_tasks(Path("examples/tasks"), workspace=SETTINGS, command=None)
    assert [trajectory.reward for trajectory in idle] == [0.0] * 5


def test_an_image_that_cannot_be_built_is_a_problem_of_its_task(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "broken")
    (folder / "environment/Dockerfile").write_text("FROM localhost/agent-loop-busybox\nRUN no_such_program\n")
    (report,) = asyncio.run(check_tasks(folder, settings=SETTINGS))
    assert report.problems[0].startswith("doing nothing has no reward")
    assert "no_such_program" in report.problems[0]


def test_tests_and_solution_are_not_in_the_container_before_they_are_needed(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "hidden")
    (folder / "environment/Dockerfile").write_text("FROM localhost/agent-loop-busybox\nWORKDIR /app\n")
    (folder / "solution/solve.sh").write_text("#!/bin/sh\nls / > listing\n")
    (folder / "tests/test.sh").write_text(
        "#!/bin/sh\n"
        "if [ -e /app/listing ] && ! grep -q tests /app/listing; then reward=1; else reward=0; fi\n"
        "if [ ! -e /app/listing ] && [ -e /solution ]; then reward=1; fi\n"
        "echo $reward > /logs/verifier/reward.txt\n"
    )
    (report,) = asyncio.run(check_tasks(folder, settings=SETTINGS))
    assert report.problems == ()
