"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


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
