"""The file of `agent-loop rollout` and its journal: what is kept when something goes wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agent_loop.config import Config
from agent_loop.errors import JournalError, OutputError
from agent_loop.rollout.trajectory_jsonl import write_records
from agent_loop.runtime.describe import describe_error
from agent_loop.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """The output file of a rollout, and its journal."""

    path: Path
    config: Config

    @property
    def journal(self) -> Path:
        """The turns of a rollout that is not over."""
        return self.path.with_name(f"{self.path.name}.journal")

    def refuse_nothing(self) -> None:
        """Raise an error unless there is a rollout to resume.

        Raises:
            JournalError: There is none.
        """
        if not self.journal.is_file():
            raise JournalError(
                f"there is no journal {str(self.journal)!r} to resume from; run it without --resume"
            )

    def keep_earlier_journal(self, console: Console) -> None:
        """Rename the journal of an earlier rollout that is not over, so that this one does not replace it.

        Raises:
            OutputError: The file cannot be renamed.
        """
        if not self.journal.exists():
            return
        number, kept = 1, self.journal
        while kept.exists():
            kept, number = self.journal.with_name(f"{self.journal.name}.before-{number}"), number + 1
        try:
            self.journal.rename(kept)
        except OSError as error:
            raise OutputError(
                f"the journal {str(self.journal)!r} of an earlier rollout cannot be renamed ({describe_error(error)}); "
                "resume it with --resume, or give another --out"
            ) from error
        console.print(
            f"an earlier rollout into {self.path} did not end; its journal is now {kept}. To resume that one, give the "
            f"journal its name again and run with --resume",
            markup=False,
        )

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write the trajectories, all of them or none. If that fails, keep them elsewhere.

        Raises:
            OutputError: The file cannot be written. The error says where the trajectories are.
        """
        try:
            self._write(trajectories)
        except Exception as error:
            raise OutputError(
                f"--out is {str(self.path)!r}, which cannot be written ({describe_error(error)}); "
                f"{self._rescued(trajectories)}"
            ) from error

    def _write(self, trajectories: Sequence[Trajectory]) -> None:
        if self.path.suffix != ".parquet":
            write_records(self.path, trajectories)
            return
        # late: keeps JSON lines free of what they do not need
        from agent_loop.storage.writer import write_trajectories

        threshold = self.config.reward.success_threshold
        write_trajectories(self.path, trajectories, step=0, split="rollout", success_threshold=threshold)

    def _rescued(self, trajectories: Sequence[Trajectory]) -> str:
        """Make sure that the trajectories are on a disk, and say where."""
        if self.journal.is_file():
            return (
                f"the trajectories are in the journal {str(self.journal)!r}. Free the disk or correct the permissions, "
                "and run the same command with --resume: nothing is run again"
            )
        spare = Path(tempfile.mkdtemp(prefix="agent-loop-rollout-")) / f"{self.path.stem}.jsonl"
        write_records(spare, trajectories)
        return f"the trajectories are in {str(spare)!r}, as JSON lines"
