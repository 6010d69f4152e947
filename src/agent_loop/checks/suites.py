"""Check the rows of a task by its name: the solution must score 1, and an empty turn must score less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from agent_loop.checks.solutions import LOOP, play_turns
from agent_loop.checks.tasks import TaskReport
from agent_loop.environments.named_rows import suite_rows
from agent_loop.environments.names import parse_task_name
from agent_loop.environments.registry import load_suite
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.errors import ConfigError
from agent_loop.runtime.concurrency import run_together

NO_SOLUTION = "the solution, since none is known"


async def check_named_tasks(
    name: str,
    *,
    limit: int | None = None,
    concurrency: int = 1,
    on_report: Callable[[TaskReport], None] | None = None,
) -> list[TaskReport]:
    """Play every row of a task twice: with its solution, and with one empty turn.

    Args:
        name: `suite:task?option=value&option=value`.
        limit: Number of rows to check. None checks all.
        concurrency: Number of rows that are checked at once.
        on_report: Called with each report as soon as it is known.

    Returns:
        The reports, in the order of the rows.

    Raises:
        ConfigError: There is no such suite, task or option, or its rows cannot be played without a model.
        DataError: The task cannot be used.
    """
    suite = load_suite(name.partition(":")[0])
    if suite.agent_name != LOOP:
        raise ConfigError(
            f"{name}: its rows are played by the loop {suite.agent_name!r}, which needs a model; use agent-loop eval"
        )
    rows = suite_rows(suite, parse_task_name(name, suite=suite))
    slots = asyncio.Semaphore(concurrency)

    async def check(number: int, row: Mapping[str, Any]) -> TaskReport:
        async with slots:
            report = await check_row(suite, row, name=f"{row['data_source']} row {number}")
        if on_report is not None:
            on_report(report)
        return report

    return await run_together(check(number, row) for number, row in enumerate(islice(rows, limit), start=1))


async def check_row(suite: TaskSuite, row: Mapping[str, Any], *, name: str) -> TaskReport:
    """Play a row with its solution, and with one empty turn."""
    clock = asyncio.get_running_loop().time
    started = clock()
    nothing, problems = await _play(suite, row, (), what="doing nothing")
    turns, solution = suite.solution(row), None
    if turns is not None:
        solution, faults = await _play(suite, row, turns, what="the solution")
        problems += faults
    problems += _wrong_rewards(suite.solved_reward, nothing=nothing, solution=solution)
    return TaskReport(
        name,
        nothing=nothing,
        solution=solution,
        problems=tuple(problems),
        ignored=() if turns is not None else (NO_SOLUTION,),
        seconds=clock() - started,
    )


def _wrong_rewards(solved: float | None, *, nothing: float | None, solution: float | None) -> list[str]:
    if solved is None:
        return []
    problems: list[str] = []
    if solution is not None and solution < solved:
        problems.append(f"the solution scores {solution:g} instead of {solved:g}")
    best = solved if solution is None else solution
    if nothing is not None and nothing >= best:
        problems.append(f"doing nothing scores {nothing:g}, no less than {best:g}")
    return problems


async def _play(
    suite: TaskSuite, row: Mapping[str, Any], turns: Sequence[SolutionTurn], *, what: str
) -> tuple[float | None, list[str]]:
    """Play turns, and return the reward and what went wrong."""
    trajectory = await play_turns(suite, row, turns)
    if trajectory.output.failure is not None:
        return None, [f"{what} fails: {trajectory.output.failure.error}"]
    if trajectory.reward is None:
        return None, [f"{what} has no reward; it ended with {trajectory.output.stop_reason}"]
    return trajectory.reward, []
