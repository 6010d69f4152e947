"""Helpers that run code with the python tool and check that no process is left running."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_loop.errors import ConfigError, ToolError
from agent_loop.tools.python import PythonTool
from tests.listeners import process_tree

PATIENCE_S = 10.0


def is_open_to_all(path: str) -> bool:
    """Return whether every user may pass through a folder and all its parents."""
    real = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (real, *real.parents))


def readable_python() -> str:
    """Return a Python that every user may run, since the agent's own may be private if it runs as root."""
    is_readable = is_open_to_all(sys.prefix) and is_open_to_all(sys.base_prefix)
    return sys.executable if is_readable else "/usr/bin/python3"


SECRET = "the agent's own secret"
os.environ["AGENT_LOOP_TEST_SECRET"] = SECRET
SMALL: dict[str, Any] = {
    "memory_mb": 256,
    "max_processes": 16,
    "temp_dir_mb": 8,
    "max_file_mb": 4,
    "max_open_files": 64,
    "python": readable_python(),
}
HASTY: dict[str, Any] = {"time_limit_s": 0.5, "interrupt_grace_s": 0.3}


@dataclass(frozen=True)
class Answer:
    """Text that the model reads."""

    text: str
    is_error: bool


def python_tool(**settings: Any) -> PythonTool:
    """Return a tool with these settings, started once. The test is skipped if this machine does not isolate."""
    started = _started(tuple(sorted((SMALL | settings).items())))
    if isinstance(started, ConfigError):
        pytest.skip(f"NO SANDBOX HERE, escapes are not tested: {started}")
    return started


@cache
def _started(settings: tuple[tuple[str, Any], ...]) -> PythonTool | ConfigError:
    try:
        return PythonTool(dict(settings))
    except ConfigError as error:
        return error


async def ask(tool: PythonTool, instance_id: str, code: str) -> Answer:
    try:
        response, _, _ = await tool.execute(instance_id, {"code": code})
    except ToolError as error:
        return Answer(str(error), is_error=True)
    return Answer(response.text or "", is_error=False)


def talk(*codes: str, **settings: Any) -> list[Answer]:
    """Run the calls of one trajectory, check that no process is left, and return the answers."""
    tool = python_tool(**settings)
    before = descendants()

    async def converse() -> list[Answer]:
        instance_id = uuid4().hex
        await tool.create(instance_id)
        try:
            return [await ask(tool, instance_id, code) for code in codes]
        finally:
            await tool.release(instance_id)

    answers = asyncio.run(converse())
    assert left_running(before) == set()
    return answers


def descendants(root: int | None = None) -> set[int]:
    """Return a process, by default this one, and all its descendants."""
    return set(process_tree(os.getpid() if root is None else root))


def left_running(before: set[int]) -> set[int]:
    """Return descendants of this process that did not exist before and do not exit."""
    return {pid for pid in descendants() - before if not ends(pid)}


def ends(pid: int) -> bool:
    """Return whether a process exits within `PATIENCE_S`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE_S)[0])
    finally:
        os.close(handle)


def running(marker: str) -> list[str]:
    """Return the command lines on this machine that contain the marker."""
    lines: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker in line:
            lines.append(line)
    return lines
