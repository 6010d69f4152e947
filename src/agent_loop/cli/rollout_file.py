"""Output file of `agent-loop rollout` and its journal, which keep the trajectories if something fails."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agent_loop.config import Config
from agent_loop.errors import JournalError, OutputError
from agent_loop.runtime.describe import describe_error
from agent_loop.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """The output file of a rollout, and its journal."""

    path: Path
    config: Config
    as_jsonl: bool = False
    """Whether to write JSON lines, and not Parquet."""

    @property
    def journal(self) -> Path:
        """Path of the journal, which exists until the rollout is complete."""
        return self.path.with_name(f"{self.path.name}.journal")

    def require_journal(self) -> None:
        """Raise an error unless there is a rollout to resume.

        Raises:
            JournalError: There is no journal.
        """
        if not self.journal.is_file():
            raise JournalError(
                f"there is no journal {str(self.journal)!r} to resume from; run the command without --resume"
            )

    def keep_earlier_journal(self, console: Console) -> None:
        """Rename the journal of an earlier, incomplete rollout, so that it is not overwritten.

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
            f"an earlier rollout into {self.path} is incomplete; its journal is now {kept}. To resume that rollout, "
            f"rename its journal to {self.journal.name} and run with --resume",
            markup=False,
        )

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write all trajectories. If the file cannot be written, they are in the journal or in a temporary file.

        Raises:
            OutputError: The file cannot be written. The error names the file that has the trajectories.
        """
        try:
            self._write(trajectories)
        except Exception as error:
            raise OutputError(
                f"--out is {str(self.path)!r}, which cannot be written ({describe_error(error)}); "
                f"{self._rescue(trajectories)}"
            ) from error

    def _write(self, trajectories: Sequence[Trajectory]) -> None:
        # late: keeps `--help` quick
        from agent_loop.storage.json_lines import write_lines
        from agent_loop.storage.writer import write_trajectories

        if self.as_jsonl:
            write_lines(self.path, trajectories, split="rollout")
        else:
            threshold = self.config.reward.success_threshold
            write_trajectories(self.path, trajectories, step=0, split="rollout", success_threshold=threshold)

    def _rescue(self, trajectories: Sequence[Trajectory]) -> str:
        """Write the trajectories to a temporary file unless the journal has them, and return a text with its path."""
        if self.journal.is_file():
            return (
                f"the trajectories are in the journal {str(self.journal)!r}. Free the disk or correct the permissions, "
                "and run the same command with --resume; no trajectory is run again"
            )
        from agent_loop.storage.json_lines import write_lines  # late: keeps `--help` quick

        spare = Path(tempfile.mkdtemp(prefix="agent-loop-rollout-")) / f"{self.path.stem}.jsonl"
        write_lines(spare, trajectories, split="rollout")
        return f"the trajectories are in {str(spare)!r}, as JSON lines"
