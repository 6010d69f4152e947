"""A workspace that is a folder of this machine. Its commands run beside this process, without isolation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_loop.errors import ConfigError, WorkspaceError, WorkspaceFileMissing
from agent_loop.runtime.child_process import CommandResult, inherited_environment, run_command
from agent_loop.runtime.owner import OWNER_VARIABLE, kill_processes
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.base import NO_VARIABLES, Workspace, WorkspaceProvider
from agent_loop.workspaces.root import make_folder, remove_folder


class FolderWorkspace(Workspace):
    """An own folder of this machine.

    Commands inherit the variables of `inherited_environment` alone, and are killed when the workspace stops.

    Args:
        name: Name that begins with the owner's token. The folder and the commands are marked with it.
        env: Environment variables of commands.
    """

    def __init__(self, name: str, *, env: Mapping[str, str] = NO_VARIABLES) -> None:
        self._name = name
        self._env = dict(env)
        self._home = make_folder(name)
        self._folder = self._home / "workspace"
        self._folder.mkdir()
        self.folder = str(self._folder)
        self.home = str(self._home / "home")

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = NO_VARIABLES,
        folder: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> CommandResult:
        self._check_open()
        variables = {
            **inherited_environment(),
            "PWD": self.folder,
            **self._env,
            **env,
            OWNER_VARIABLE: self._name,
        }
        cwd = self._folder / (folder or "")
        try:
            return await run_command(command, env=variables, stdin=stdin, cwd=cwd, timeout_s=timeout_s)
        except ConfigError as error:
            raise WorkspaceError(f"{error} (folder {cwd})") from error

    async def put(self, source: Path, target: str) -> None:
        self._check_open()
        try:
            await run_in_thread(copy, source, self._folder / target_of(source, target))
        except OSError as error:
            raise WorkspaceError(f"{source} cannot be put at {target}: {error}") from error

    async def get(self, source: str, target: Path) -> None:
        self._check_open()
        path = self._folder / source
        if not path.exists():
            raise WorkspaceFileMissing(f"the workspace has no {source!r}")
        try:
            await run_in_thread(copy, path, target)
        except OSError as error:
            raise WorkspaceError(f"{source} cannot be copied out of the workspace: {error}") from error

    async def stop(self) -> None:
        await run_in_thread(self._remove)

    def _remove(self) -> None:
        if self._home.exists():
            kill_processes(lambda owner: owner == self._name)
            remove_folder(self._home)

    def _check_open(self) -> None:
        if not self._folder.is_dir():
            raise WorkspaceError(f"the folder of the workspace, {self.folder}, does not exist any more")


class FolderProvider(WorkspaceProvider):
    """Starts each workspace with a copy of a folder.

    Args:
        source: The folder. None starts with an empty folder.
        env: Environment variables of commands.
    """

    def __init__(self, source: Path | None, *, env: Mapping[str, str] = NO_VARIABLES) -> None:
        self._source = source
        self._env = env

    async def start(self, name: str) -> Workspace:
        if self._source is None:
            return FolderWorkspace(name, env=self._env)
        if not self._source.is_dir():
            raise WorkspaceError(
                f"workspace.folder is {str(self._source)!r}, which is not a folder; name one"
            )
        workspace = FolderWorkspace(name, env=self._env)
        try:
            await workspace.put(self._source, workspace.folder)
        except BaseException:
            await workspace.stop()
            raise
        return workspace


def target_of(source: Path, target: str) -> str:
    """Return the path of a copy: in the target for a file, if the target ends with `/`."""
    return f"{target}{source.name}" if target.endswith("/") and not source.is_dir() else target


def copy(source: Path, target: Path) -> None:
    """Copy a file to a path, or merge the contents of a folder into a folder. Symbolic links stay links.

    Raises:
        OSError: The source does not exist, or a file cannot be read or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=_copy_file)
    else:
        _copy_file(source, target)


def _copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> str:
    """Copy a file with its mode and times. Refuse devices, pipes and sockets, whose copying may never end."""
    if not Path(source).is_file():
        raise OSError(f"{os.fspath(source)} is not a regular file")
    return str(shutil.copy2(source, target))
