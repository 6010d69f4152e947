"""Folder of an evaluation: its files, and whether an evaluation may start or resume there.

runs/eval/
    trajectories.jsonl   trajectories in the order in which they end, during the evaluation
    trajectories.parquet trajectories; written at the end
    rollout.journal      turns; removed at the end
    summary.json         scores; written at the end
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_loop.cli.running import by_id
from agent_loop.errors import ConfigError, JournalError, OutputError
from agent_loop.runtime.describe import describe_error
from agent_loop.training.evaluation.summary import SUMMARY_FILE, EvaluationSummary, read_summary
from agent_loop.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_loop.rollout.journal import StepKey

SPLIT = "eval"


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """Folder of an evaluation, and the paths of its files."""

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
        """Prepare the folder for a new evaluation, which may replace another one with `overwrite` alone."""
        files = [file for file in (self.summary, self.journal) if file.exists()]
        if files and not overwrite:
            what = "a finished" if self.summary in files else "an unfinished"
            raise ConfigError(
                f"{str(self.path)!r} holds {what} evaluation; resume it with --resume, replace it with --overwrite, or "
                "give another folder with --out"
            )
        for file in files:
            file.unlink()

    def require_evaluation(self) -> None:
        """Raise an error unless there is an evaluation to resume."""
        if not self.summary.exists() and not self.journal.exists():
            raise JournalError(
                f"{str(self.path)!r} holds no evaluation to resume; run the command without --resume, or give the "
                "evaluation's folder with --out"
            )

    def finished(self, key: StepKey) -> EvaluationSummary | None:
        """Return the summary of a finished evaluation, or None if the evaluation can be resumed."""
        from agent_loop.rollout.journal import StepKey  # late: keeps `--help` quick

        if not self.summary.exists():
            return None
        summary = read_summary(self.summary)
        changed = key.differences(StepKey(**summary.settings))
        if changed:
            raise JournalError(
                f"{str(self.path)!r} holds another evaluation: {', '.join(changed)} changed; restore the settings to "
                "show it, or give another folder with --out"
            )
        return summary

    def finish(
        self,
        trajectories: Iterable[Trajectory],
        *,
        summary: EvaluationSummary,
        success_threshold: float,
        as_jsonl: bool = False,
    ) -> None:
        """Write the sorted trajectories and the summary. With `as_jsonl`, keep JSON lines too."""
        # late: keeps `--help` quick
        from agent_loop.storage.json_lines import write_lines
        from agent_loop.storage.writer import write_trajectories

        in_order, stored = sorted(trajectories, key=by_id), self.trajectories.with_suffix(".parquet")
        try:
            write_trajectories(stored, in_order, step=0, split=SPLIT, success_threshold=success_threshold)
            if as_jsonl:
                write_lines(self.trajectories, in_order, split=SPLIT)
            else:
                self.trajectories.unlink(missing_ok=True)
            summary.write(self.summary)
            self.journal.unlink(missing_ok=True)
        except OSError as error:
            kept = f"the finished trajectories are in {str(self.trajectories)!r}"
            if self.journal.exists():
                kept += " and in the journal. Free the disk, and run the same command with --resume"
            raise OutputError(
                f"{str(self.path)!r} cannot be written ({describe_error(error)}); {kept}"
            ) from error
