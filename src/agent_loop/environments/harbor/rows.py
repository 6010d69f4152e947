"""Turn tasks into rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_loop.environments.harbor.folders import INSTRUCTION, find_tasks, folder_name, task_digest
from agent_loop.environments.harbor.task import HarborTask, read_task
from agent_loop.environments.harbor.workspace import task_workspace
from agent_loop.errors import DataError

UNUSABLE_LOOP = "unusable_row"
"""The agent loop of rows that cannot be used. It fails with the row's `error`."""
_METADATA_COLUMNS = ("difficulty", "category", "tags")


def harbor_rows(source: str, workspace: Mapping[str, Any]) -> Iterator[tuple[str, Any]] | None:
    """Return the rows of a folder of tasks, or of one task, with their locations. Return None for other sources.

    A task that cannot be used becomes a row that fails with the reason, so that the other tasks can run.

    Args:
        source: Path of the folder.
        workspace: Settings that are merged over the workspace of every row.

    Raises:
        ConfigError: The settings are wrong.
        DataError: None of the tasks can be used.
    """
    folders = find_tasks(Path(source))
    if not folders:
        return None
    rows = [_row(folder, workspace=workspace) for folder in folders]
    errors = [row["error"] for row in rows if "error" in row]
    if len(errors) == len(rows):
        raise DataError(f"none of the {len(rows)} tasks in {source!r} can be used; the first: {errors[0]}")
    return iter([(f"task {str(folder)!r}", row) for folder, row in zip(folders, rows, strict=True)])


def task_row(task: HarborTask, *, workspace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a task.

    Args:
        task: The task.
        workspace: Settings that are merged over the row's workspace.
    """
    owner, slash, _ = task.name.rpartition("/")
    timeout_s = task.file.agent.timeout_sec
    metadata = {name: task.file.metadata[name] for name in _METADATA_COLUMNS if name in task.file.metadata}
    return {
        "raw_prompt": [{"role": "user", "content": task.instruction}],
        "task": task.name,
        "data_source": owner if slash else task.folder.resolve().parent.name,
        "workspace": task_workspace(task, settings=workspace),
        "task_digest": task_digest(task.folder),
        **({} if timeout_s is None else {"trajectory_timeout_s": timeout_s}),
        **({"extra_info": metadata} if metadata else {}),
    }


def _row(folder: Path, *, workspace: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return task_row(read_task(folder), workspace=workspace)
    except DataError as error:
        name = folder_name(folder)
        return {
            "raw_prompt": [{"role": "user", "content": f"(task {name}: see {INSTRUCTION})"}],
            "task": name,
            "agent_name": UNUSABLE_LOOP,
            "error": str(error),
        }
