"""Files of a sandbox, which writes to a folder of the host."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from itertools import chain

WORK_FOLDERS = ("home", "tmp", "shm")
ENTRY_BYTES = 4096
"""Minimum size that is counted for a directory entry."""
BLOCK_BYTES = 512


def make_work_folders(parent: str) -> None:
    """Create the home, temporary and shared-memory folders of a sandbox."""
    for name in WORK_FOLDERS:
        os.makedirs(f"{parent}/{name}", exist_ok=True)


def empty_work_folders(parent: str) -> None:
    """Remove the contents of the folders."""
    for name in WORK_FOLDERS:
        remove_folder(f"{parent}/{name}")
    make_work_folders(parent)


def remove_folder(path: str) -> None:
    """Remove a folder of any depth and with any permissions, as far as this user may."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    for program in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(path):
            subprocess.run([*program, "--", path], stderr=subprocess.DEVNULL, check=False)


def files_exceed(limit_bytes: int, *, folder: str, pids: Iterable[int]) -> bool:
    """Return whether files exceed a total size. Files that cannot be counted count as exceeding it.

    Args:
        limit_bytes: Maximum total size.
        folder: The folder with the files.
        pids: Processes that may hold deleted files open.
    """
    total = 0
    try:
        for size in chain(_sizes_of_removed(pids), _sizes_below(folder)):
            total += size
            if total > limit_bytes:
                return True
    except OSError:
        return True
    return False


def _sizes_below(top: str) -> Iterator[int]:
    folders = [top]
    while folders:
        folder = folders.pop()
        try:
            entries = os.scandir(folder)
        except FileNotFoundError:
            continue  # it has been removed
        with entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield max(status.st_blocks * BLOCK_BYTES, ENTRY_BYTES)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.path)


def _sizes_of_removed(pids: Iterable[int]) -> Iterator[int]:
    seen: set[tuple[int, int]] = set()
    for pid in pids:
        for status in _open_files(pid):
            file = status.st_dev, status.st_ino
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and file not in seen:
                seen.add(file)
                yield status.st_blocks * BLOCK_BYTES


def _open_files(pid: int) -> Iterator[os.stat_result]:
    folder = f"/proc/{pid}/fd"
    try:
        for number in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(f"{folder}/{number}")
    except OSError:
        if not _is_ending(pid):
            raise


def _is_ending(pid: int) -> bool:
    """Return whether a process has released its memory while exiting; its `/proc` files then belong to root."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return file.read().startswith("0 ")
    except (FileNotFoundError, ProcessLookupError):
        return True
