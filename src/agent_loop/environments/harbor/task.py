"""Read and validate a task's folder."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.config.validation import parse_section
from agent_loop.environments.harbor.folders import (
    DOCKERFILE,
    ENVIRONMENT,
    INSTRUCTION,
    SOLUTION,
    SOLUTION_SCRIPT,
    TASK_FILE,
    TEST_SCRIPT,
    TESTS,
    folder_name,
)
from agent_loop.environments.harbor.task_file import TaskFile, ignored_keys, unsupported_keys
from agent_loop.errors import ConfigError, DataError

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""Line that marks the data of a benchmark. It is not shown to the agent."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task that was read and validated."""

    folder: Path
    instruction: str
    file: TaskFile
    ignored: tuple[str, ...] = ()
    """Keys of `task.toml` that have no effect, each with the reason."""

    @property
    def name(self) -> str:
        """Published name, such as `org/name`, or the name of the folder."""
        return folder_name(self.folder) if self.file.task is None else self.file.task.name

    @property
    def tests(self) -> Path:
        return self.folder / TESTS

    @property
    def solution(self) -> Path | None:
        """Folder of the solution, if the task has one."""
        folder = self.folder / SOLUTION
        return folder if (folder / SOLUTION_SCRIPT).is_file() else None


def read_task(folder: Path) -> HarborTask:
    """Read a task.

    Raises:
        DataError: A file is missing or invalid, or the task needs something that is not supported. The message starts
            with the task's folder.
    """
    where = f"task {str(folder)!r}"
    file = _read_file(folder / TASK_FILE, where=where)
    instruction = _read_instruction(folder / INSTRUCTION, where=where)
    faults = unsupported_keys(file)
    if faults:
        raise DataError(
            f"{where}: {TASK_FILE} asks for {', '.join(faults)}, which is not supported; leave the task out"
        )
    _check_files(folder, file, where=where)
    return HarborTask(folder, instruction, file, tuple(ignored_keys(file)))


def _read_file(path: Path, *, where: str) -> TaskFile:
    try:
        values: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{where} has no {TASK_FILE}; write one") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: {TASK_FILE} is not valid TOML ({error}); fix it") from error
    try:
        return parse_section(TaskFile, values, where=TASK_FILE)
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error


def _read_instruction(path: Path, *, where: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{where} has no {INSTRUCTION}; write the text that the agent gets") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {INSTRUCTION} cannot be read ({error})") from error
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    text = "\n".join(lines).strip()
    if not text:
        raise DataError(f"{where}: {INSTRUCTION} is empty; write the text that the agent gets")
    return text


def _check_files(folder: Path, file: TaskFile, *, where: str) -> None:
    environment = folder / ENVIRONMENT
    compose = [name for name in COMPOSE_FILES if (environment / name).is_file()]
    if compose:
        raise DataError(
            f"{where}: {ENVIRONMENT}/{compose[0]} describes several containers, which is not supported; leave the "
            "task out"
        )
    if file.environment.docker_image is None and not (environment / DOCKERFILE).is_file():
        raise DataError(
            f"{where} has neither {ENVIRONMENT}/{DOCKERFILE} nor environment.docker_image in {TASK_FILE}; give one of "
            "them"
        )
    if not (folder / TESTS / TEST_SCRIPT).is_file():
        raise DataError(f"{where} has no {TESTS}/{TEST_SCRIPT}; write the script that judges the result")
