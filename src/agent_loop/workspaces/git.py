"""A workspace that is a git repository at a commit."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from agent_loop.errors import ConfigError, WorkspaceError
from agent_loop.runtime.child_process import CommandResult, inherited_environment, run_command
from agent_loop.runtime.owner import this_process
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.base import NO_VARIABLES, Workspace, WorkspaceProvider
from agent_loop.workspaces.folder import FolderWorkspace
from agent_loop.workspaces.root import remove_at_exit, remove_folder, root_folder
from agent_loop.workspaces.settings import GitSettings

GIT_TIMEOUT_S = 600.0


class GitProvider(WorkspaceProvider):
    """Clones a repository once per process, and starts each workspace with a local clone of it.

    The workspace's clone has no remotes, so that programs can neither change nor find the shared one.

    Args:
        settings: The repository and its commit.
        env: Environment variables of commands.
    """

    def __init__(self, settings: GitSettings, *, env: Mapping[str, str] = NO_VARIABLES) -> None:
        self._settings = settings
        self._env = env
        self._url = _absolute(settings.url)
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def start(self, name: str) -> Workspace:
        clones = root_folder() / f"{this_process().token}.clones"
        clone = clones / hashlib.sha256(self._url.encode()).hexdigest()[:16]
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if not clone.exists():
                await self._clone(clone)
            commit = await self._find_commit(clone)
        workspace = FolderWorkspace(name, env=self._env)
        try:
            folder = workspace.folder
            await _git("clone", "--quiet", "--local", "--no-checkout", str(clone), folder)
            await _git("-C", folder, "checkout", "--quiet", "--detach", commit)
            await _git("-C", folder, "remote", "remove", "origin")
        except BaseException:
            await workspace.stop()
            raise
        return workspace

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


def _absolute(url: str) -> str:
    """Return a path as an absolute path, and a URL as it is."""
    path = Path(url).expanduser()
    return str(path.resolve()) if path.exists() else url


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
