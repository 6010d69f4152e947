"""The folder of this machine in which workspaces keep their files, and the removal of what killed processes left."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from agent_loop.errors import WorkspaceError
from agent_loop.runtime.identifiers import new_id
from agent_loop.runtime.owner import parse_owner, this_process


def new_name() -> str:
    """Return a unique name that begins with the token of this process."""
    return f"{this_process().token}.{new_id()[:12]}"


def root_folder() -> Path:
    """Return the folder of all workspaces of this user, which only this user may open.

    Raises:
        WorkspaceError: The folder belongs to somebody else.
    """
    root = Path(tempfile.gettempdir()) / f"agent-loop-workspaces-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise WorkspaceError(
            f"{root} is not a folder of this user; remove it, or set TMPDIR to another folder"
        )
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
        owner = parse_owner(folder.name)
        if owner is not None and owner.is_dead:
            remove_folder(folder)
            num_removed += 1
    return num_removed


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
