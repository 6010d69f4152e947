"""Provider whose workspaces are folders of this machine, for tests of tasks without a container runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_loop.runtime.child_process import CommandResult
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.base import NO_VARIABLES, Workspace, WorkspaceProvider
from agent_loop.workspaces.folder import FolderWorkspace

_ABSOLUTE = re.compile(r"(?<![\w.])/(?=(logs|tests|solution)\b)")


class RelocatedWorkspace(FolderWorkspace):
    """Folder in which the absolute paths of tasks are below the working folder, also in the text of scripts."""

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = NO_VARIABLES,
        folder: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> CommandResult:
        moved = [self._moved(part) for part in command]
        return await super().exec(moved, env=env, folder=folder, stdin=stdin, timeout_s=timeout_s)

    async def put(self, source: Path, target: str) -> None:
        await super().put(source, self._moved(target))
        await run_in_thread(self._move_scripts, Path(self._moved(target)))

    async def get(self, source: str, target: Path) -> None:
        await super().get(self._moved(source), target)

    def _move_scripts(self, folder: Path) -> None:
        for path in folder.rglob("*.sh"):
            path.write_text(self._moved(path.read_text()))

    def _moved(self, text: str) -> str:
        return _ABSOLUTE.sub(f"{self.folder}/", text)


class Relocated(WorkspaceProvider):
    """Starts such folders. They are empty.

    Args:
        container: The settings of the task's container.
    """

    def __init__(self, container: Mapping[str, Any]) -> None:
        assert container["dockerfile"]

    async def start(self, name: str) -> Workspace:
        return RelocatedWorkspace(name)
