"""Journals of a training run: one file per step since the last checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_NAME = re.compile(r"step-(\d{6,})(?:\.refill-\d+|\.forks)?\.journal")


class JournalFolder:
    """Folder of the journals of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "journal"

    def file(self, step: int, *, refill: int = 0, is_of_forks: bool = False) -> Path:
        """Return the path of the journal of a step. Each refill of a step, and its forks, have separate journals."""
        suffix = ".forks" if is_of_forks else f".refill-{refill}" if refill else ""
        return self.path / f"step-{step:06d}{suffix}.journal"

    def has(self, step: int) -> bool:
        """Return whether a step has a journal."""
        return self.file(step).is_file()

    def drop_through(self, step: int) -> None:
        """Remove the journals of all steps up to `step`, which a checkpoint contains."""
        self._drop(lambda each: each <= step)

    def drop_after(self, step: int) -> list[int]:
        """Remove the journals of the steps after `step`, whose weights are lost. Return these steps, in order."""
        return self._drop(lambda each: each > step)

    def _drop(self, is_old: Callable[[int], bool]) -> list[int]:
        dropped: set[int] = set()
        for step, path in self._files():
            if is_old(step):
                path.unlink(missing_ok=True)
                dropped.add(step)
        return sorted(dropped)

    def _files(self) -> list[tuple[int, Path]]:
        """Return all journals with their steps."""
        if not self.path.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.path.iterdir())
        return [(int(name[1]), path) for name, path in named if name]
