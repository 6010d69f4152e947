"""Tests of checking tasks, in folders instead of containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent_loop.checks import check_tasks
from agent_loop.checks.tasks import TaskReport
from agent_loop.cli import app
from agent_loop.errors import ConfigError, DataError, WorkspaceError
from agent_loop.workspaces.base import Workspace, WorkspaceProvider
from tests.environments.harbor.tasks import write_task


class NeverStarts(WorkspaceProvider):
    """Provider whose workspaces cannot be started."""

    def __init__(self, container: Mapping[str, Any]) -> None:
        pass

    async def start(self, name: str) -> Workspace:
        raise WorkspaceError("the cloud is closed")


PROVIDER = "tests.environments.harbor.relocated:Relocated"
JUDGES_THE_ANSWER = """\
#!/bin/sh
echo "the answer is $(cat answer.txt)"
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write(folder: Path, *, test: str = JUDGES_THE_ANSWER, solution: str | None = None) -> Path:
    write_task(folder)
    (folder / "tests/test.sh").write_text(test)
    if solution is not None:
        (folder / "solution/solve.sh").write_text(f"#!/bin/sh\n{solution}\n")
    return folder


def check(path: Path, *, concurrency: int = 1) -> list[TaskReport]:
    settings = {"provider": PROVIDER}
    return asyncio.run(check_tasks(path, settings=settings, concurrency=concurrency))


def test_a_task_whose_solution_scores_1_and_nothing_scores_0_passes(tmp_path: Path) -> None:
    (report,) = check(write(tmp_path / "answer"))
    assert report.is_passed
    assert (report.name, report.nothing, report.solution) == ("answer", 0.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "rewards", "parts"),
    [
        (
            {"test": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"},
            (1.0, 1.0),
            ["doing nothing scores 1 instead of 0"],
        ),
        (
            {"solution": "echo 41 > answer.txt"},
            (0.0, 0.0),
            ["the solution scores 0 instead of 1", "the answer is 41"],
        ),
        (
            {"solution": "echo 42 > answer.txt; echo no more; exit 3"},
            (0.0, 1.0),
            ["exit status 3", "no more"],
        ),
        ({"test": "#!/bin/sh\necho broken here\nexit 1\n"}, (None, None), ["broken here", "wrote no"]),
    ],
    ids=["nothing", "wrong", "failed", "no reward"],
)
def test_a_faulty_task_fails_with_the_output_of_its_scripts(
    tmp_path: Path, changes: dict[str, str], rewards: tuple[float | None, float | None], parts: list[str]
) -> None:
    (report,) = check(write(tmp_path / "answer", **changes))
    assert not report.is_passed
    assert (report.nothing, report.solution) == rewards
    assert [part for part in parts if part not in report.problems[-1]] == []


def test_a_reward_as_json_counts_before_one_as_text(tmp_path: Path) -> None:
    test = JUDGES_THE_ANSWER + (
        "if [ -e answer.txt ]; then reward=1; else reward=0; fi\n"
        'echo "{\\"reward\\": $reward, \\"style\\": 0.5}" > /logs/verifier/reward.json\n'
        "echo 0.25 > /logs/verifier/reward.txt\n"
    )
    (report,) = check(write(tmp_path / "answer", test=test))
    assert (report.nothing, report.solution) == (0.0, 1.0)


def test_a_reward_left_by_the_agent_does_not_count(tmp_path: Path) -> None:
    solution = "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt"
    (report,) = check(write(tmp_path / "answer", test="#!/bin/sh\nexit 1\n", solution=solution))
    assert report.solution is None


def test_a_task_without_a_solution_fails(tmp_path: Path) -> None:
    folder = write(tmp_path / "answer")
    (folder / "solution/solve.sh").unlink()
    (report,) = check(folder)
    assert "solution/solve.sh" in report.problems[0]


def test_a_faulty_task_does_not_stop_the_others(tmp_path: Path) -> None:
    write(tmp_path / "good")
    write(tmp_path / "bad")
    (tmp_path / "bad/task.toml").write_text("[environment]\ncpu = 1\n")
    bad, good = check(tmp_path)
    assert "environment.cpu" in bad.problems[0]
    assert good.is_passed


def test_a_workspace_that_cannot_start_is_a_problem_of_its_task(tmp_path: Path) -> None:
    write(tmp_path / "answer")
    settings = {"provider": f"{__name__}:NeverStarts"}
    (report,) = asyncio.run(check_tasks(tmp_path, settings=settings))
    assert report.problems == (
        "doing nothing has no reward: the cloud is closed",
        "the solution has no reward: the cloud is closed",
    )


def test_a_wrong_setting_ends_the_check(tmp_path: Path) -> None:
    write(tmp_path / "answer")
    with pytest.raises(ConfigError, match="no_such_module"):
        asyncio.run(check_tasks(tmp_path, settings={"provider": "no_such_module:Provider"}))


def test_several_tasks_are_checked_at_once(tmp_path: Path) -> None:
    for own, other in (("a", "b"), ("b", "a")):
        meets = (
            f"touch {tmp_path}/{own}.seen; n=0; while [ ! -e {tmp_path}/{other}.seen ]; do sleep 0.05; done\n"
        )
        write(tmp_path / "tasks" / own, test=JUDGES_THE_ANSWER + meets)
    assert all(report.is_passed for report in check(tmp_path / "tasks", concurrency=2))


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a task nor a folder of tasks"):
        check(tmp_path)


def test_the_command_prints_each_task_and_fails_if_one_fails(tmp_path: Path) -> None:
    write(tmp_path / "good")
    write(tmp_path / "wrong", solution="echo 41 > answer.txt")
    runner = CliRunner()
    shown = runner.invoke(app, ["check", "tasks", str(tmp_path), f"provider={PROVIDER}"])
    assert shown.exit_code == 1
    assert "1 of 2 tasks passed" in shown.output
    assert "wrong: the solution scores 0 instead of 1" in shown.output
    config = tmp_path / "config.yaml"
    config.write_text(f"data:\n  workspace:\n    provider: {PROVIDER}\n")
    options = ["--config", str(config), "--json"]
    passed = runner.invoke(app, ["check", "tasks", str(tmp_path / "good"), *options])
    assert passed.exit_code == 0
    (report,) = json.loads(passed.stdout)
    assert (report["name"], report["nothing"], report["solution"]) == ("good", 0.0, 1.0)
