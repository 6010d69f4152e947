"""A training run: its folder, the checkpoint that it starts from, its learner, its metrics and its checkpoints."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from agent_loop.config import Config
from agent_loop.errors import CheckpointError, ConfigError
from agent_loop.rollout.journal import JournalFolder
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.threads import run_in_thread
from agent_loop.storage.exclusive import exclusive_folder
from agent_loop.storage.metrics_file import CONFIG_FILE, METRICS_FILE, written_parts
from agent_loop.storage.run import drop_steps_after
from agent_loop.training.checkpoint import (
    Checkpoint,
    checkpoints_folder,
    latest_checkpoint,
    list_checkpoints,
    named_checkpoint,
    save_checkpoint,
    step_of,
)
from agent_loop.training.evaluation.scores import Evaluation
from agent_loop.training.learner import Learner, load_learner
from agent_loop.training.loggers import Scalars, flat
from agent_loop.training.manifest import DataManifest
from agent_loop.training.metrics import MetricsWriter, forget_steps_after
from agent_loop.training.progress import Progress
from agent_loop.training.ranks import start_process_group
from agent_loop.training.row_selection import RowSelector
from agent_loop.training.timing import StepClock

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run."""

    step: int
    """Completed steps, including those before a resume."""
    is_interrupted: bool
    """The run was stopped before `trainer.total_steps`."""
    run_dir: Path
    checkpoint: Path | None
    """The last checkpoint; None if none was written."""
    metrics: Mapping[str, float]
    """Metrics of the last step of this run."""
    evaluation: Evaluation | None
    """Last evaluation of this run."""


class Interrupt:
    """Request of the first SIGINT to stop after the current step. The second raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    @contextmanager
    def listening(self) -> Generator[None]:
        """Handle SIGINT while the body runs. Do nothing outside the main thread, because only that gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        previous = signal.getsignal(signal.SIGINT)

        def on_sigint() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # the second one gets Python's own handler
            self._requested.set()

        loop.add_signal_handler(signal.SIGINT, on_sigint)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, previous)

    async def unless_requested(self, call: Coroutine[Any, Any, ResultT]) -> ResultT | None:
        """Await a call. When a stop is requested, cancel the call and return None."""

        async def requested() -> None:
            await self._requested.wait()

        return await run_while(call, condition=requested())


SFT_SPLIT, SFT_VAL_SPLIT = "sft", "sft_val"
"""Splits of supervised examples."""
TRAINED_SPLITS = ("train", SFT_SPLIT)
SOURCES = {
    "train": "data.train_files",
    "val": "data.val_files",
    SFT_SPLIT: "sft.files",
    SFT_VAL_SPLIT: "sft.val_files",
}
"""Setting with the files of each split."""


@dataclass(frozen=True, slots=True)
class Start:
    """Starting point of a run: a checkpoint, journals, or nothing."""

    checkpoint: Checkpoint | None = None
    from_journals: bool = False
    """The run was killed before its first checkpoint. Its journals are enough to reproduce it."""
    notes: Sequence[str] = ()
    """Notes for the user."""


@contextmanager
def claimed_folder(
    config: Config, *, resume: bool | str, overwrite: bool, manifests: Mapping[str, DataManifest]
) -> Generator[Start]:
    """Lock the folder of a run during the body, and yield what the run starts from. Nothing else is written yet."""
    if resume and overwrite:
        raise ConfigError("resume and overwrite are both set; give one of them")
    run_dir = Path(config.trainer.run_dir)
    with exclusive_folder(run_dir, name="trainer.run_dir"):
        is_own, has_checkpoints = resume in (True, "auto"), bool(list_checkpoints(run_dir))
        from_journals = is_own and not has_checkpoints and JournalFolder(run_dir).file(1).is_file()
        if from_journals:
            yield Start(None, True, ["there is no checkpoint yet; resuming from the journals"])
        elif resume == "auto" and not has_checkpoints:
            yield Start(notes=[f"there is nothing to resume from in {run_dir}; starting a new run"])
        elif resume:
            checkpoint = latest_checkpoint(run_dir) if is_own else named_checkpoint(Path(str(resume)))
            _refuse_later_checkpoints(run_dir, checkpoint)
            allows_changes = config.data.allow_changed_rows
            notes = check_rows_unchanged(checkpoint, manifests, allow_changed=allows_changes)
            yield Start(checkpoint, notes=notes)
        else:
            written = written_parts(run_dir)
            if written and not overwrite:
                raise ConfigError(
                    f"trainer.run_dir {str(run_dir)!r} holds a run already ({' and '.join(written)}); resume it, "
                    "overwrite it, or set trainer.run_dir to a new folder"
                )
            yield Start()


def _refuse_later_checkpoints(run_dir: Path, checkpoint: Checkpoint) -> None:
    later = [path.name for path in list_checkpoints(run_dir) if step_of(path) > checkpoint.step]
    if later:
        raise CheckpointError(
            f"the run resumes after step {checkpoint.step}, but {str(run_dir)!r} holds later checkpoints "
            f"({', '.join(later)}); move them elsewhere, or set trainer.run_dir to a new folder"
        )


def check_rows_unchanged(
    checkpoint: Checkpoint, rows: Mapping[str, DataManifest], *, allow_changed: bool
) -> list[str]:
    """Raise an error if the training rows have changed, because the rows of a step follow from their positions.

    Return notes on other rows that have changed.
    """
    notes: list[str] = []
    for split in sorted(rows.keys() & checkpoint.rows.keys()):
        changes = rows[split].changes_since(checkpoint.rows[split])
        if changes is None:
            continue
        if split in TRAINED_SPLITS and not allow_changed:
            raise CheckpointError(
                f"the training rows are not those of the checkpoint {str(checkpoint.path)!r} ({changes}); put the "
                "files back as they were, or set data.allow_changed_rows=true to resume with the rows as they are"
            )
        notes.append(f"the rows of {SOURCES[split]} changed since that checkpoint ({changes})")
    return notes


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """An open run: what all trainers use. Created by `open_run`."""

    config: Config
    start: Start
    learner: Learner
    writer: MetricsWriter
    progress: Progress
    interrupt: Interrupt
    clock: StepClock
    journals: JournalFolder
    tokenizer: Any
    manifests: Mapping[str, DataManifest]
    selector: RowSelector | None
    completed: int
    """Completed steps. This is also the version of the weights."""
    saved: Path | None
    """The last checkpoint."""

    @property
    def is_over(self) -> bool:
        return self.completed >= self.config.trainer.total_steps or self.interrupt.is_requested

    def is_due(self, every: int | None) -> bool:
        """Return whether the last completed step is an `every`-th step or the last one."""
        is_last = self.completed == self.config.trainer.total_steps
        return every is not None and (is_last or self.completed % every == 0)

    async def save(self) -> None:
        """Save a checkpoint of the last completed step, unless it is already saved."""
        if self.saved is not None and step_of(self.saved) == self.completed:
            return
        with self.clock.phase("save"):
            self.saved = await run_in_thread(
                save_checkpoint,
                Path(self.config.trainer.run_dir),
                step=self.completed,
                learner=self.learner,
                tokenizer=self.tokenizer,
                config=self.config.model_dump(mode="json"),
                rows=self.manifests,
                selector=self.selector,
                keep=self.config.trainer.keep_checkpoints,
            )
        self.journals.drop_through(self.completed)

    async def finish(
        self, metrics: Mapping[str, float], *, evaluation: Evaluation | None = None
    ) -> TrainResult:
        """Return the result, after saving a checkpoint if the run was interrupted."""
        is_interrupted = self.completed < self.config.trainer.total_steps
        if is_interrupted:
            await self.save()
            self.progress.say(f"stopped after step {self.completed}; resume to continue from {self.saved}")
        return TrainResult(
            self.completed,
            is_interrupted,
            Path(self.config.trainer.run_dir),
            self.saved,
            metrics,
            evaluation,
        )


@asynccontextmanager
async def open_run(
    config: Config,
    start: Start,
    *,
    tokenizer: Any,
    manifests: Mapping[str, DataManifest],
    loggers: Sequence[BackgroundWriter[Scalars]],
    console: Console | None,
    selector: RowSelector | None = None,
) -> AsyncGenerator[Run]:
    """Start the training processes, load the learner, and prepare the folder of the run, which `start` claimed."""
    run_dir, checkpoint = Path(config.trainer.run_dir), start.checkpoint
    async with AsyncExitStack() as stack:
        process_group = await stack.enter_async_context(start_process_group(config))
        learner = await run_in_thread(
            load_learner, config, checkpoint=checkpoint, process_group=process_group
        )
        _prepare_folder(run_dir, config=config, start=start)
        progress = stack.enter_context(Progress(total_steps=config.trainer.total_steps, console=console))
        writer = stack.enter_context(MetricsWriter(run_dir / METRICS_FILE, loggers=loggers))
        interrupt = Interrupt()
        stack.enter_context(interrupt.listening())
        if checkpoint is not None:
            progress.say(f"resuming after step {checkpoint.step} from {checkpoint.path}")
            changed = changed_keys(checkpoint.config, config.model_dump(mode="json"))
            if changed:
                progress.say(f"changed since that checkpoint: {', '.join(changed)}")
        if checkpoint is not None and selector is not None:
            before, now = checkpoint.rows.get("train"), manifests["train"]
            note = selector.load(
                checkpoint.path, has_same_rows=before is not None and before.digest == now.digest
            )
            if note is not None:
                progress.say(note)
        for note in start.notes:
            progress.say(note)
        yield Run(
            config=config,
            start=start,
            learner=learner,
            writer=writer,
            progress=progress,
            interrupt=interrupt,
            clock=StepClock(),
            journals=JournalFolder(run_dir),
            tokenizer=tokenizer,
            manifests=manifests,
            selector=selector,
            completed=0 if checkpoint is None else checkpoint.step,
            saved=None if checkpoint is None else checkpoint.path,
        )


def _prepare_folder(run_dir: Path, *, config: Config, start: Start) -> None:
    """Remove what an earlier run wrote after the start of this one, and write the configuration."""
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics_path, journals = run_dir / METRICS_FILE, JournalFolder(run_dir)
    if start.checkpoint is None:
        shutil.rmtree(checkpoints_folder(run_dir), ignore_errors=True)
        metrics_path.unlink(missing_ok=True)
        drop_steps_after(run_dir, step=-1)
        if not start.from_journals:
            journals.drop_after(0)
    else:
        forget_steps_after(metrics_path, step=start.checkpoint.step)
        drop_steps_after(run_dir, step=start.checkpoint.step)
        journals.drop_through(start.checkpoint.step)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys in which two configurations differ."""
    old, new = flat(before), flat(now)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
