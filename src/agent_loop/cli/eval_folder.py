"""The folder of an evaluation: what it may be begun or gone on with, and what is left in it.

runs/eval/
    trajectories.jsonl   each trajectory; while it runs, in the order in which they end
    trajectories.parquet the same, as `agent-loop show` and others read it; there when it is over
    rollout.journal      its turns; removed when it is over
    summary.json         the scores; there when it is over
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_loop.cli.running import by_id
from agent_loop.errors import ConfigError, JournalError, OutputError
from agent_loop.rollout.trajectory_jsonl import write_records, writing_records
from agent_loop.runtime.describe import describe_error
from agent_loop.storage.exclusive import exclusive_folder
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
            ConfigError: There is one already, and it is not to be overwritten.
        """
        files = [file for file in (self.summary, self.journal) if file.exists()]
        if files and not overwrite:
            what = "a finished" if self.summary in files else "an unfinished"
            raise ConfigError(
                f"{str(self.path)!r} holds {what} evaluation; go on with --resume, begin anew with --overwrite, or "
                "give another folder with --out"
            )
        for file in files:
            file.unlink()

    def locked(self) -> AbstractContextManager[None]:
        """Create the folder, and keep other processes from evaluating into it.

        Raises:
            OutputError: The folder cannot be written, or another process does.
        """
        return exclusive_folder(self.path, name="--out")

    def refuse_nothing(self) -> None:
        """Raise an error unless there is an evaluation to resume.

        Raises:
            JournalError: There is none.
        """
        if not self.summary.exists() and not self.journal.exists():
            raise JournalError(
                f"{str(self.path)!r} holds no evaluation to resume; run it without --resume, or give its folder with "
                "--out"
            )

    def finished(self, key: StepKey) -> EvaluationSummary | None:
        """The summary of an evaluation that is over; None where there is a journal to go on from.

        Raises:
            DataError: The summary is damaged.
            JournalError: It is of another evaluation.
        """
        from agent_loop.rollout.journal.step import StepKey  # late: keeps `--help` quick

        if not self.summary.exists():
            return None
        summary = read_summary(self.summary)
        changed = key.differences(StepKey(**summary.settings))
        if changed:
            raise JournalError(
                f"{str(self.path)!r} holds another evaluation: {', '.join(changed)} changed; run as before to see it, "
                "or give another folder with --out"
            )
        return summary

    @contextmanager
    def writing_trajectories(self) -> Generator[Callable[[Trajectory], None]]:
        """Yield what adds a trajectory to the file.

        Raises:
            OutputError: The file cannot be written, when it is opened or later.
        """
        with ExitStack() as stack:
            try:
                write = stack.enter_context(writing_records(self.trajectories))
            except OSError as error:
                raise self._unwritten(self.trajectories, error) from error

            def add(trajectory: Trajectory) -> None:
                try:
                    write(trajectory)
                except OSError as error:
                    raise self._unwritten(self.trajectories, error) from error

            yield add

    def finish(
        self, trajectories: Iterable[Trajectory], *, summary: EvaluationSummary, success_threshold: float
    ) -> None:
        """Bring the trajectories in order and write the summary.

        Raises:
            OutputError: A file cannot be written.
        """
        from agent_loop.storage.writer import write_trajectories  # late: keeps `--help` quick

        in_order, stored = sorted(trajectories, key=by_id), self.trajectories.with_suffix(".parquet")
        try:
            write_records(self.trajectories, in_order)
            write_trajectories(stored, in_order, step=0, split="eval", success_threshold=success_threshold)
            summary.write(self.summary)
            self.journal.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritten(self.path, error) from error

    def _unwritten(self, path: Path, error: OSError) -> OutputError:
        kept = f"the trajectories that ended are in {str(self.trajectories)!r}"
        if self.journal.exists():
            kept += " and in the journal. Free the disk, and run the same command with --resume: they are not run again"
        return OutputError(f"{str(path)!r} cannot be written ({describe_error(error)}); {kept}")
