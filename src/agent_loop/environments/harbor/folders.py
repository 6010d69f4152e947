"""Find the folders of tasks."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

TASK_FILE = "task.toml"
INSTRUCTION = "instruction.md"
ENVIRONMENT = "environment"
DOCKERFILE = "Dockerfile"
TESTS = "tests"
TEST_SCRIPT = "test.sh"
SOLUTION = "solution"
SOLUTION_SCRIPT = "solve.sh"
_MARKS = (TASK_FILE, INSTRUCTION, ENVIRONMENT)
"""Files and folders of a task. A folder with at least two of them is taken for a task."""


def find_tasks(path: Path) -> list[Path]:
    """Return the folders of tasks at a path, sorted by name: the path itself, or the tasks directly in it.

    A folder in which only `task.toml` or another part is missing counts as a task. The list is empty if no folder has
    a `task.toml`.
    """
    if not path.is_dir():
        return []
    if (path / TASK_FILE).is_file():
        return [path]
    folders = [inner for inner in sorted(path.iterdir()) if inner.is_dir() and _looks_like_a_task(inner)]
    return folders if any((folder / TASK_FILE).is_file() for folder in folders) else []


def folder_name(folder: Path) -> str:
    """Return the name of a task's folder, also if the path is `.`."""
    return folder.resolve().name


def task_digest(folder: Path) -> str:
    """Return a digest of the names and contents of a task's files."""
    digest = sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def _looks_like_a_task(folder: Path) -> bool:
    return (folder / TASK_FILE).is_file() or sum((folder / name).exists() for name in _MARKS) > 1
