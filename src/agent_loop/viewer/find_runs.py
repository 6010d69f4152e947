"""Runs and evaluations below folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agent_loop.files.file_kinds import EVALUATION, RUN, kind_of

MAX_DEPTH = 3
"""Levels of folders below a path that are searched."""
NOT_SEARCHED = frozenset({"checkpoints", "trajectories", "workspaces"})
"""Folders of a run that hold no runs."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs and evaluations at the paths and below them, each once. Files are returned unchanged."""
    found = (run for path in paths for run in ([path] if path.is_file() else _runs_below(path, MAX_DEPTH)))
    return list({run.resolve(): run for run in found}.values())


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    kind = kind_of(path)
    if kind in (RUN, EVALUATION):
        yield path
    elif kind is not None:
        return
    if not depth:
        return
    try:
        inner = sorted(folder for folder in path.iterdir() if folder.is_dir() and _is_searched(folder.name))
    except OSError:
        return
    for folder in inner:
        yield from _runs_below(folder, depth - 1)


def _is_searched(name: str) -> bool:
    return not name.startswith(".") and name not in NOT_SEARCHED
