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
from uuid import uuid4

from agent_loop.errors import WorkspaceError
from agent_loop.runtime.owner import Owner, parse_owner, this_process

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
    """Return the folder of all workspaces of this user, which only this user may open.

    Raises:
        WorkspaceError: The folder belongs to somebody else.
    """
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
