"""Locks on folders and files, so that two runs do not write to the same one, and files that are written whole."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from agent_loop.errors import OutputError
from agent_loop.runtime.describe import describe_error


@contextmanager
def whole_file(path: Path, *, to_disk: bool = False) -> Generator[Path]:
    """Yield the path of a temporary file that takes the place of `path` when the block ends.

    If the block raises, the temporary file is removed, and what was at `path` is untouched. Only a regular file is
    replaced: a device, pipe or symbolic link would be lost.

    Args:
        to_disk: Wait until the file is on the disk, so that a machine that loses power keeps the old one or the new.

    Raises:
        OSError: The file cannot be written, or `path` is not a regular file.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        if to_disk:
            sync_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if to_disk:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MAX_COMMAND = 200
"""Maximum characters of the command line of a lock's owner in an error message."""


@contextmanager
def exclusive_folder(folder: Path, *, name: str) -> Generator[None]:
    """Create a folder and hold its lock. The operating system releases the lock when this process ends.

    Args:
        folder: Gets two small files: `.lock`, which remains, and `.lock.owner` while the lock is held. A folder that
            was created here and has no other files is removed again.
        name: The option or setting that names the folder, for errors.
    """
    is_new, lock = False, folder / ".lock"
    with _errors_named(folder, name=name):
        is_new = not folder.exists()
        if not is_new and not folder.is_dir():
            raise OutputError(f"{name} is {str(folder)!r}, which is a file; give a folder")
    try:
        with _exclusive(lock, what=folder, name=name):
            yield
    finally:
        with suppress(OSError):
            if is_new and [*folder.iterdir()] == [lock]:
                lock.unlink()
                folder.rmdir()


@contextmanager
def exclusive_file(file: Path, *, name: str) -> Generator[None]:
    """Hold the lock of a file. The lock is in the same folder. See `exclusive_folder`."""
    with _errors_named(file, name=name):
        if not file.name or file.is_dir():
            raise OutputError(f"{name} is {str(file)!r}, which is a folder; give a file in it")
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise OutputError(
                f"{name} is {str(file)!r}, which is a device, pipe or symbolic link; give the path of a regular file"
            )
    with _exclusive(file.with_name(f".{file.name}.lock"), what=file, name=name):
        yield


@contextmanager
def _exclusive(path: Path, *, what: Path, name: str) -> Generator[None]:
    lock, owner = FileLock(path, thread_local=False), path.with_name(f"{path.name}.owner")
    with _errors_named(what, name=name):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()  # FileLock takes some errors of this kind for a lock that is held
            lock.acquire(timeout=0)
        except Timeout:
            raise OutputError(
                f"{name} is {str(what)!r}, which another run is writing: {_described(owner)}. Wait until it has ended, "
                "or give another path"
            ) from None
    try:
        with _errors_named(what, name=name):
            _sign(owner)
        yield
    finally:
        with suppress(OSError):
            owner.unlink(missing_ok=True)
        lock.release()


@contextmanager
def _errors_named(what: Path, *, name: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{name} is {str(what)!r}, which cannot be written or locked ({describe_error(error)}); free the disk, "
            "correct the permissions, or give a path on another file system"
        ) from error


def _sign(owner: Path) -> None:
    """Write which process holds the lock, for later error messages. Fails on a full disk, before any work."""
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    owner.write_text(json.dumps(facts), encoding="utf-8")


def _described(owner: Path) -> str:
    try:
        facts = json.loads(owner.read_text(encoding="utf-8"))
        command = str(facts["command"])
        shown = command if len(command) <= MAX_COMMAND else f"{command[:MAX_COMMAND]}..."
        return f"process {facts['pid']} on {facts['host']}, since {facts['since']}: {shown}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"
