"""The journals of a training: one file per step, from the last checkpoint on."""

from __future__ import annotations

import re
from pathlib import Path


class JournalFolder:
    """Which steps of a run have a journal.

    Args:
        run_dir: The folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "journal"

    def file(self, step: int) -> Path:
        """Where the journal of a step is or will be."""
        return self.path / f"step-{step:06d}.journal"

    def steps(self) -> list[int]:
        """The steps that have one, in order."""
        if not self.path.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d{6,})\.journal", path.name) for path in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def has(self, step: int) -> bool:
        """Whether a step has one."""
        return self.file(step).is_file()

    def drop_through(self, step: int) -> None:
        """Removes those up to a step, which a checkpoint holds."""
        self._drop([each for each in self.steps() if each <= step])

    def drop_after(self, step: int) -> None:
        """Removes those behind a step: they are of weights that will not come again."""
        self._drop([each for each in self.steps() if each > step])

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            self.file(step).unlink(missing_ok=True)
