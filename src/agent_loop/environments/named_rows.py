"""Rows of tasks that are named as `suite:task?option=value`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.environments.names import TaskName, is_task_name, parse_task_name
from agent_loop.environments.registry import load_suite
from agent_loop.environments.splits import select_rows
from agent_loop.environments.suite import TaskSuite
from agent_loop.errors import AgentLoopError, DataError
from agent_loop.runtime.describe import describe_error


def named_rows(source: str, workspace: Mapping[str, Any]) -> Iterator[tuple[str, Any]] | None:
    """Return the rows of a task by its name, with their locations. Return None for other sources.

    Args:
        source: `suite:task?option=value&option=value`.
        workspace: Not used: an environment has no workspace.

    Raises:
        ConfigError: There is no such suite, task or option, or the suite's package is not installed.
        DataError: The task cannot be used.
    """
    if not is_task_name(source):
        return None
    suite = load_suite(source.partition(":")[0])
    rows = suite_rows(suite, parse_task_name(source, suite=suite))
    return ((f"{source} row {number}", row) for number, row in enumerate(rows, start=1))


def suite_rows(suite: TaskSuite, name: TaskName) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task, with the columns that the loop reads.

    Raises:
        ConfigError: The suite's package is not installed, or an option is wrong.
        DataError: The task cannot be used.
    """
    added = {"agent_name": suite.agent_name, "environment": suite.name, "data_source": name.data_source}
    selected = select_rows(
        suite.rows(name.task, name.options),
        split=name.split,
        identity=suite.identity,
        size=getattr(name.options, "size", None),
        where=name.text,
    )
    try:
        for row in selected:
            prompt = row["raw_prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            yield {**row, "raw_prompt": messages, **added}
    except AgentLoopError:
        raise
    except Exception as error:
        raise DataError(f"{name.text}: making its rows raised {describe_error(error)}") from error
