"""The journals of a training: one file per step, from the last checkpoint on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_NAME = re.compile(r"step-(\d{6,})(?:\.refill-\d+)?\.journal")


class JournalFolder:
    """Which steps of a run have a journal.

    Args:
        run_dir: The folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "journal"

    def file(self, step: int, *, refill: int = 0) -> Path:
        """Where the journal of a step is or will be; one that is refilled has another for each time."""
        suffix = f".refill-{refill}" if refill else ""
        return self.path / f"step-{step:06d}{suffix}.journal"

    def steps(self) -> list[int]:
        """The steps that have one, in order."""
        return sorted({step for step, _ in self._files()})

    def has(self, step: int) -> bool:
        """Whether a step has one."""
        return self.file(step).is_file()

    def drop_through(self, step: int) -> None:
        """Removes those up to a step, which a checkpoint holds."""
        self._drop(lambda each: each <= step)

    def drop_after(self, step: int) -> list[int]:
        """Remove those of later steps, which are of weights that will not come again. Return these steps, in order."""
        return self._drop(lambda each: each > step)

    def _drop(self, is_old: Callable[[int], bool]) -> list[int]:
        dropped: set[int] = set()
        for step, path in self._files():
            if is_old(step):
                path.unlink(missing_ok=True)
                dropped.add(step)
        return sorted(dropped)

    def _files(self) -> list[tuple[int, Path]]:
        """Each with its step."""
        if not self.path.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.path.iterdir())
        return [(int(name[1]), path) for name, path in named if name]
