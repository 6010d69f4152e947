"""Workspaces that are folders of this machine: empty, a copy of a folder, or a git repository at a commit.

Their commands run beside this process, without isolation.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import shutil
import stat
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from agent_loop.errors import ConfigError, WorkspaceError, WorkspaceFileMissing
from agent_loop.runtime.child_process import CommandResult, inherited_environment, run_command
from agent_loop.runtime.owner import OWNER_VARIABLE, Owner, kill_processes, parse_owner, this_process
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.base import NO_VARIABLES, Workspace, WorkspaceProvider
from agent_loop.workspaces.settings import GitSettings

OWNER_FILE = "owner"
"""File in a folder with a stable path. It holds the unique name, which begins with the owner's token."""
_KEY = ".key-"


def new_name(key: str = "") -> str:
    """Return a unique name that begins with the token of this process.

    Args:
        key: Letters and digits that identify the trajectory, also in a later process. `make_folder` uses them.
    """
    name = f"{this_process().token}.{uuid4().hex[:12]}"
    return f"{name}{_KEY}{key}" if key else name


def make_folder(name: str) -> Path:
    """Make the folder with a name, and return it.

    If the name has a key, the path of the folder depends on the key alone, as long as no other folder with the key is
    in use. Programs that tell the model their path then send the same requests when a trajectory is resumed.
    """
    folder = root_folder() / name
    folder.mkdir(mode=0o700)
    key = name.partition(_KEY)[2]
    if not key:
        return folder
    (folder / OWNER_FILE).write_text(name)
    stable = root_folder() / f"trajectory-{key}"
    try:
        return folder.rename(stable)
    except OSError:  # another process uses it, or another trajectory with the same row and id
        return folder


def root_folder() -> Path:
    """Return the folder of all workspaces of this user, which only this user may open."""
    root = Path(tempfile.gettempdir()) / f"agent-loop-workspaces-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise WorkspaceError(f"{root} is not a folder of this user; set TMPDIR to another folder")
    return root


def remove_folder(folder: Path) -> None:
    """Remove a folder, also if programs have taken away the rights to write into it."""
    shutil.rmtree(folder, onerror=_make_writable)


@cache
def remove_at_exit(folder: Path) -> None:
    """Remove a folder when this process ends."""
    pid = os.getpid()
    atexit.register(lambda: remove_folder(folder) if os.getpid() == pid and folder.exists() else None)


def remove_orphaned_folders() -> int:
    """Remove the folders of workspaces whose owner is dead, and return their number."""
    num_removed = 0
    for folder in root_folder().iterdir():
        owner = parse_owner(folder.name) or _recorded_owner(folder)
        if owner is not None and owner.is_dead:
            remove_folder(folder)
            num_removed += 1
    return num_removed


def _recorded_owner(folder: Path) -> Owner | None:
    try:
        return parse_owner((folder / OWNER_FILE).read_text())
    except OSError:
        return None


def _make_writable(function: Callable[..., Any], path: str, _: Any) -> None:
    """Give the owner all rights to a path and its folder, and try again. Give up silently if that fails too."""
    try:
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if function in (os.open, os.scandir, os.listdir):
            os.chmod(path, stat.S_IRWXU)
            shutil.rmtree(path, ignore_errors=True)
        else:
            function(path)
    except OSError:
        pass


class FolderWorkspace(Workspace):
    """An own folder of this machine.

    Commands inherit the variables of `inherited_environment` alone, and are killed when the workspace stops.
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


class LocalProvider(WorkspaceProvider):
    """Base class of providers of folders of this machine."""

    def __init__(self, *, env: Mapping[str, str] = NO_VARIABLES) -> None:
        self._env = env

    async def start(self, name: str) -> Workspace:
        workspace = FolderWorkspace(name, env=self._env)
        try:
            await self.fill(workspace)
        except BaseException:
            await workspace.stop()
            raise
        return workspace

    @abstractmethod
    async def fill(self, workspace: FolderWorkspace) -> None:
        """Write the files with which a workspace starts."""


class FolderProvider(LocalProvider):
    """Starts each workspace with a copy of a folder, or empty."""

    def __init__(self, source: Path | None, *, env: Mapping[str, str] = NO_VARIABLES) -> None:
        super().__init__(env=env)
        self._source = source

    async def fill(self, workspace: FolderWorkspace) -> None:
        if self._source is None:
            return
        if not self._source.is_dir():
            raise WorkspaceError(
                f"workspace.folder is {str(self._source)!r}, which is not a folder; name one"
            )
        await workspace.put(self._source, workspace.folder)


def target_of(source: Path, target: str) -> str:
    """Return the path of a copy: in the target for a file, if the target ends with `/`."""
    return f"{target}{source.name}" if target.endswith("/") and not source.is_dir() else target


def copy(source: Path, target: Path) -> None:
    """Copy a file to a path, or merge the contents of a folder into a folder. Symbolic links stay links."""
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


GIT_TIMEOUT_S = 600.0


class GitProvider(LocalProvider):
    """Clones a repository once per process, and starts each workspace with a local clone of it.

    The workspace's clone has no remotes, so that programs can neither change nor find the shared one.
    """

    def __init__(self, settings: GitSettings, *, env: Mapping[str, str] = NO_VARIABLES) -> None:
        super().__init__(env=env)
        self._settings = settings
        path = Path(settings.url).expanduser()
        self._url = str(path.resolve()) if path.exists() else settings.url
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def fill(self, workspace: FolderWorkspace) -> None:
        clones = root_folder() / f"{this_process().token}.clones"
        clone = clones / hashlib.sha256(self._url.encode()).hexdigest()[:16]
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if not clone.exists():
                await self._clone(clone)
            commit = await self._find_commit(clone)
        folder = workspace.folder
        await _git("clone", "--quiet", "--local", "--no-checkout", str(clone), folder)
        await _git("-C", folder, "checkout", "--quiet", "--detach", commit)
        await _git("-C", folder, "remote", "remove", "origin")

    async def _clone(self, clone: Path) -> None:
        """Clone the repository next to the target and rename it, so that an interrupted clone is never used."""
        clone.parent.mkdir(exist_ok=True)
        remove_at_exit(clone.parent)
        unfinished = clone.with_suffix(".unfinished")
        if unfinished.exists():
            await run_in_thread(remove_folder, unfinished)
        await _git("clone", "--quiet", "--mirror", self._url, str(unfinished))
        unfinished.rename(clone)

    async def _find_commit(self, clone: Path) -> str:
        """Return the hash of the commit. Fetch it if the clone does not have it."""
        commit = self._settings.commit
        find = ["-C", str(clone), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
        found = await _run_git(*find)
        if found.exit_code:
            fetched = await _run_git("-C", str(clone), "fetch", "--quiet", "origin", commit)
            if fetched.exit_code:
                raise WorkspaceError(
                    f"workspace.git.commit is {commit!r}, which {self._url} does not have: {fetched.stderr.strip()}"
                )
            found = await _run_git("-C", str(clone), "rev-parse", "--verify", "FETCH_HEAD^{commit}")
        return found.stdout.strip()


async def _git(*arguments: str) -> None:
    result = await _run_git(*arguments)
    if result.exit_code:
        raise WorkspaceError(f"git {' '.join(arguments)} failed: {result.stderr.strip()}")


async def _run_git(*arguments: str) -> CommandResult:
    git = shutil.which("git")
    if git is None:
        raise ConfigError("a git workspace needs git, which is not installed; install it")
    env = {**inherited_environment(), "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_COUNT": "1"}
    env |= {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    result = await run_command([git, *arguments], env=env, timeout_s=GIT_TIMEOUT_S)
    if result.timed_out:
        raise WorkspaceError(f"git {' '.join(arguments)} took longer than {GIT_TIMEOUT_S:g} s")
    return result
