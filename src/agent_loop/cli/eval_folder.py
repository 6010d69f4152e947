"""The folder of an evaluation: what it may be begun or gone on with, and what is left in it.

runs/eval/
    trajectories.jsonl   each trajectory; while it runs, in the order in which they end
    trajectories.parquet the same, as `agent-loop show` and others read it; there when it is over
    rollout.journal      its turns; removed when it is over
    summary.json         the scores; there when it is over
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_loop.cli.running import by_id
from agent_loop.errors import ConfigError, JournalError
from agent_loop.rollout.records import write_records, writing_records
from agent_loop.training.evaluation import SUMMARY_FILE, EvaluationSummary, read_summary
from agent_loop.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_loop.rollout.journal.step import StepKey


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """Where an evaluation is kept."""

    path: Path

    @property
    def summary(self) -> Path:
        return self.path / SUMMARY_FILE

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "rollout.journal"

    def begin(self, *, overwrite: bool) -> None:
        """Makes sure that a new evaluation can be kept here.

        Raises:
            ConfigError: There is one already, and it is not to be overwritten, or the path is that of a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--out is {str(self.path)!r}, which is a file; give a folder")
        files = [file for file in (self.summary, self.journal) if file.exists()]
        if files and not overwrite:
            what = "a finished" if self.summary in files else "an unfinished"
            raise ConfigError(
                f"{str(self.path)!r} holds {what} evaluation; go on with --resume, begin anew with --overwrite, or "
                "give another folder with --out"
            )
        for file in files:
            file.unlink()

    def finished(self, key: StepKey) -> EvaluationSummary | None:
        """The summary of an evaluation that is over; None where there is a journal to go on from.

        Raises:
            DataError: The summary is damaged.
            JournalError: It is of another evaluation, or there is nothing to go on from.
        """
        from agent_loop.rollout.journal.step import StepKey  # late: keeps `--help` quick

        if not self.summary.exists():
            if not self.journal.exists():
                raise JournalError(
                    f"{str(self.path)!r} holds no evaluation to resume; run it without --resume, or give its folder "
                    "with --out"
                )
            return None
        summary = read_summary(self.summary)
        changed = key.differences(StepKey(**summary.settings))
        if changed:
            raise JournalError(
                f"{str(self.path)!r} holds another evaluation: {', '.join(changed)} changed; run as before to see it, "
                "or give another folder with --out"
            )
        return summary

    def writing_trajectories(self) -> AbstractContextManager[Callable[[Trajectory], None]]:
        """Yields what adds a trajectory to the file."""
        return writing_records(self.trajectories)

    def finish(
        self, trajectories: Iterable[Trajectory], *, summary: EvaluationSummary, success_threshold: float
    ) -> None:
        """Brings the trajectories in order and writes the summary."""
        from agent_loop.storage.writer import write_trajectories  # late: keeps `--help` quick

        in_order, temporary = sorted(trajectories, key=by_id), self.path / ".trajectories.jsonl.tmp"
        write_records(temporary, in_order)
        os.replace(temporary, self.trajectories)
        stored = self.trajectories.with_suffix(".parquet")
        write_trajectories(stored, in_order, step=0, split="eval", success_threshold=success_threshold)
        summary.write(self.summary)
        self.journal.unlink(missing_ok=True)
