"""Files as tar archives, the form in which runtimes copy them into and out of containers."""

from __future__ import annotations

import logging
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from agent_loop.workspaces.folder import copy

logger = logging.getLogger(__name__)

MAX_BYTES = 2**33
"""Size of the largest archive that is copied out of a container."""


def pack(source: Path, target: str, file: BinaryIO, *, owner: tuple[int, int]) -> None:
    """Write a file or a folder as an archive that is extracted at the root folder.

    Args:
        source: The file or folder.
        target: Absolute path at which it is extracted.
        file: The archive.
        owner: User and group id of the files.

    Raises:
        OSError: A file cannot be read.
    """

    def owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid, info.gid = owner
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(source.resolve(), posixpath.normpath(target).lstrip("/") or ".", filter=owned)


def unpack(file: BinaryIO, target: Path) -> None:
    """Extract the one file or folder of an archive to a path, and merge it with a folder that exists.

    Files that would be written elsewhere, links that lead elsewhere and devices are left out, which is logged.

    Raises:
        OSError: A file cannot be written.
        tarfile.TarError: The archive is broken.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(folder, filter=_without_escapes)
        [extracted] = folder.iterdir()
        copy(extracted, target)
        shutil.rmtree(extracted, ignore_errors=True)


def bounded_writer(file: BinaryIO) -> Callable[[bytes], None]:
    """Return a function that writes to a file and discards what exceeds `MAX_BYTES`."""

    def write(data: bytes) -> None:
        if file.tell() <= MAX_BYTES:
            file.write(data)

    return write


def _without_escapes(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, path)
    except tarfile.FilterError as error:
        logger.warning("%s is not copied out of the workspace: %s", member.name, error)
        return None
