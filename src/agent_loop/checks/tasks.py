"""Check tasks before they are used: the solution must score 1, and doing nothing must score 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent_loop.environments.harbor import (
    SOLUTION_FOLDER,
    SOLUTION_SCRIPT,
    TEST_OUTPUT,
    HarborTask,
    find_tasks,
    folder_name,
    read_task,
    resolve_variables,
    task_workspace,
)
from agent_loop.errors import AgentLoopError, ConfigError, DataError, WorkspaceError
from agent_loop.runtime.concurrency import run_together
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.check import check_reward
from agent_loop.workspaces.factory import open_workspace
from agent_loop.workspaces.settings import WorkspaceSettings, read_workspace

SOLUTION_TIMEOUT_S = 3600.0
"""Time limit of solutions of tasks without `agent.timeout_sec`."""
MAX_SHOWN = 600
"""Characters of an output's end that a problem shows."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Result of checking one task."""

    name: str
    folder: Path | None = None
    """Folder of the task. None if it is a row of a suite."""
    nothing: float | None = None
    """Reward of doing nothing. None if it is unknown."""
    solution: float | None = None
    """Reward of the solution. None if it is unknown."""
    problems: tuple[str, ...] = ()
    """Why the task should not be used. Empty if it passed."""
    ignored: tuple[str, ...] = ()
    """What has no effect, each with the reason: keys of `task.toml`, or the solution if none is known."""
    seconds: float = 0.0

    @property
    def is_passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Attempt:
    """One trajectory of a task."""

    reward: float | None = None
    output: str = ""
    """Output of the tests, or why there is no reward."""
    problem: str = ""
    """Error of the solution; empty if it ran without one."""


async def check_tasks(
    path: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    concurrency: int = 1,
    on_report: Callable[[TaskReport], None] | None = None,
) -> list[TaskReport]:
    """Check a task, or all tasks of a folder.

    Args:
        path: Folder of the task or tasks.
        settings: Settings that are merged over the workspaces of the tasks.
        concurrency: Number of tasks that are checked at once.
        on_report: Called with each report as soon as it is known.

    Returns:
        The reports, sorted by folder.

    Raises:
        ConfigError: The settings are wrong.
        DataError: There is no task.
    """
    folders = find_tasks(path)
    if not folders:
        raise DataError(
            f"{str(path)!r} is neither a task nor a folder of tasks; give a folder with a task.toml, or a name "
            "such as suite:task"
        )
    checks = (partial(_check_task, folder, settings=settings or {}) for folder in folders)
    return await run_checks(checks, concurrency=concurrency, on_report=on_report)


async def run_checks(
    checks: Iterable[Callable[[], Awaitable[TaskReport]]],
    *,
    concurrency: int,
    on_report: Callable[[TaskReport], None] | None,
) -> list[TaskReport]:
    """Run checks, `concurrency` of them at once, and return their reports in order."""
    slots, clock = asyncio.Semaphore(concurrency), asyncio.get_running_loop().time

    async def run(check: Callable[[], Awaitable[TaskReport]]) -> TaskReport:
        async with slots:
            started = clock()
            report = replace(await check(), seconds=clock() - started)
        if on_report is not None:
            on_report(report)
        return report

    return await run_together(map(run, checks))


def problems_of(what: str, attempt: Attempt, *, wanted: str, accepts: Callable[[float], bool]) -> list[str]:
    """Return what is wrong with an attempt, whose reward should be `wanted`."""
    problems = [f"{what} {attempt.problem}"] if attempt.problem else []
    if attempt.reward is None:
        problems.append(f"{what} has no reward: {attempt.output}")
    elif not accepts(attempt.reward):
        problems.append(f"{what} scores {attempt.reward:g} instead of {wanted}{_shown(attempt.output)}")
    return problems


async def _check_task(folder: Path, *, settings: Mapping[str, Any]) -> TaskReport:
    """Run a task's tests twice, each time in a new workspace: at once, and after its solution."""
    name = folder_name(folder)
    try:
        task = read_task(folder)
        workspace = read_workspace(task_workspace(task, settings=settings))
        solution_env = resolve_variables(task.file.solution.env, task=task, settings=settings)
    except DataError as error:
        return TaskReport(name, folder, problems=(str(error),))
    if task.solution is None:
        problem = f"there is no solution/{SOLUTION_SCRIPT}; write the script that solves the task"
        return TaskReport(task.name, folder, problems=(problem,), ignored=task.ignored)
    nothing = await _attempt(task, workspace)
    solved = await _attempt(task, workspace, solution_env=solution_env)
    problems = (
        *problems_of("doing nothing", nothing, wanted="0", accepts=lambda reward: reward == 0),
        *problems_of("the solution", solved, wanted="1", accepts=lambda reward: reward == 1),
    )
    return TaskReport(task.name, folder, nothing.reward, solved.reward, problems, task.ignored)


async def _attempt(
    task: HarborTask, settings: WorkspaceSettings, *, solution_env: Mapping[str, str] | None = None
) -> Attempt:
    """Run the tests in a new workspace, after the solution if its environment is given."""
    assert settings.check is not None
    try:
        async with open_workspace(settings) as workspace:
            problem = ""
            if solution_env is not None:
                problem = await _solve(task, workspace, env=solution_env)
            score = await check_reward(workspace, settings.check)
            output = "\n".join(filter(None, (await _test_output(workspace), score.extra.get("check_output"))))
            return Attempt(score.reward, output, problem)
    except ConfigError:
        raise
    except AgentLoopError as error:
        return Attempt(output=str(error))


async def _solve(task: HarborTask, workspace: Workspace, *, env: Mapping[str, str]) -> str:
    """Run the solution and return what went wrong; an empty text if nothing did."""
    assert task.solution is not None
    await workspace.put(task.solution, SOLUTION_FOLDER)
    script = f"{SOLUTION_FOLDER}/{SOLUTION_SCRIPT}"
    result = await workspace.exec(
        ["sh", "-c", f"chmod +x {script} && exec {script}"],
        env={"DEBIAN_FRONTEND": "noninteractive", **env},
        timeout_s=task.file.agent.timeout_sec or SOLUTION_TIMEOUT_S,
    )
    if not result.timed_out and result.exit_code == 0:
        return ""
    how = "its time limit" if result.timed_out else f"exit status {result.exit_code}"
    return f"ended with {how}{_shown(f'{result.stdout}{result.stderr}')}"


async def _test_output(workspace: Workspace) -> str:
    with TemporaryDirectory() as folder:
        target = Path(folder) / "output"
        try:
            await workspace.get(TEST_OUTPUT, target)
            return target.read_text(errors="replace")
        except (WorkspaceError, OSError):
            return ""


def _shown(output: str) -> str:
    """Return the end of an output for a message, or an empty text if there is no output."""
    kept = output.strip()[-MAX_SHOWN:]
    return f"; its output ends with: {kept}" if kept else ""
