"""The folder that a sandbox without a file system of its own writes to."""

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
"""What a name costs at least."""
BLOCK_BYTES = 512


def make_work_folders(parent: str) -> None:
    """Home, temporary and shared-memory folders of a sandbox."""
    for name in WORK_FOLDERS:
        os.makedirs(f"{parent}/{name}", exist_ok=True)


def empty_work_folders(parent: str) -> None:
    """Removes what they hold."""
    for name in WORK_FOLDERS:
        remove_folder(f"{parent}/{name}")
    make_work_folders(parent)


def remove_folder(path: str) -> None:
    """Removes a folder, however deep it is and whatever its folders forbid, as far as this user may."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    for program in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(path):
            subprocess.run([*program, "--", path], stderr=subprocess.DEVNULL, check=False)


def exceeds(limit_bytes: int, *, folder: str, pids: Iterable[int]) -> bool:
    """Whether files take more room than that; also if they are hidden from being counted.

    Args:
        limit_bytes: All together.
        folder: Where they are.
        pids: Processes that may hold files open that they have removed.
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
            continue  # it was removed meanwhile
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
    """Whether a process has given up its memory; its other belongings are root's from then on."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return file.read().startswith("0 ")
    except (FileNotFoundError, ProcessLookupError):
        return True
