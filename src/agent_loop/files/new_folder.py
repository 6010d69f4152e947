"""Folders that a command creates."""

from __future__ import annotations

from pathlib import Path

from agent_loop.errors import OutputError


def refuse_existing(folder: Path) -> None:
    """Raise an error if a path exists, unless it is an empty folder.

    Raises:
        OutputError: There is a file, or a folder with files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{str(folder)!r} exists already; give the name of a new folder")
