"""Background writer of the trajectories of a training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.threads import OneThread
from agent_loop.storage.columns import Learned
from agent_loop.storage.files import drop_all_but_newest, step_path
from agent_loop.storage.schema import VOCABULARY_FILE
from agent_loop.storage.vocabulary import write_vocabulary
from agent_loop.storage.writer import write_trajectories
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)
MAX_WAITING_TOKENS = 50_000_000
"""Maximum tokens that wait to be written. Further trajectories are dropped, so that memory does not fill up."""
CLOSE_TIMEOUT_S = 120.0
"""Seconds that the end of a run waits for pending writes."""


class TrajectoryKeeper:
    """Writer of each step's trajectories to a file of the run's folder, in a thread.

    A failed write is counted and reported once per kind of error, and does not stop the run. The end of the `with`
    block waits for all writes, unless a cancellation or a second Ctrl-C ends it.

    Args:
        run_dir: The run's folder.
        num_steps: Number of newest steps whose files are kept; None keeps all, 0 none.
        success_threshold: Least reward that counts as a success.
        report: Function that reports an error to the user, called in the thread. None writes to the log.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        num_steps: int | None = None,
        success_threshold: float = 1.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._success_threshold = success_threshold
        self._report = report or logger.warning
        self._lock = threading.Lock()
        self._num_failed = 0
        self._num_waiting_tokens = 0
        self._reported: set[str] = set()
        self._thread: OneThread | None = None

    @property
    def num_failed(self) -> int:
        """Number of files that were not written."""
        return self._num_failed

    def keep_vocabulary(self, tokenizer: Any) -> None:
        """Write the text of each token, for readers that have no tokenizer."""
        path = self._run_dir / VOCABULARY_FILE
        self._queue(partial(write_vocabulary, path, tokenizer), what="the vocabulary", num_tokens=0)

    def keep(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        split: str,
        weight_version: int,
        learned: Sequence[Learned] | None = None,
    ) -> None:
        """Queue a step's trajectories. The arguments are those of `write_trajectories`."""
        write = partial(
            write_trajectories,
            step_path(self._run_dir, split=split, step=step),
            trajectories,
            step=step,
            split=split,
            weight_version=weight_version,
            success_threshold=self._success_threshold,
            learned=learned,
        )
        num_tokens = sum(len(segment) for t in trajectories for segment in t.output.segments)
        self._queue(write, what=f"the {split} trajectories of step {step}", num_tokens=num_tokens)

    def __enter__(self) -> TrajectoryKeeper:
        if self._num_steps != 0:
            self._thread = OneThread("trajectories")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        written = threading.Event()
        self._thread.submit(written.set)
        self._thread.shutdown()
        self._thread = None
        is_hurried = kind is not None and not issubclass(kind, Exception)
        if not written.wait(0.0 if is_hurried else CLOSE_TIMEOUT_S):
            self._report("trajectories whose write had not finished were not stored")

    def _queue(self, write: Callable[[], None], *, what: str, num_tokens: int) -> None:
        if self._thread is None:
            return
        with self._lock:
            is_full = self._num_waiting_tokens > MAX_WAITING_TOKENS
            self._num_waiting_tokens += 0 if is_full else num_tokens
        if is_full:
            self._fail("writing takes longer than training", what)
        else:
            self._thread.submit(self._write, write, what, num_tokens)

    def _write(self, write: Callable[[], None], what: str, num_tokens: int) -> None:
        """Write in the thread. An error does not stop the training."""
        try:
            write()
            if self._num_steps is not None:
                drop_all_but_newest(self._run_dir, num_steps=self._num_steps)
        except Exception as error:  # noqa: BLE001  (counted and reported)
            self._fail(describe_error(error), what)
        finally:
            with self._lock:
                self._num_waiting_tokens -= num_tokens

    def _fail(self, why: str, what: str) -> None:
        kind = why.partition("'")[0]  # without the name of the file
        with self._lock:
            self._num_failed += 1
            is_new = kind not in self._reported
            self._reported.add(kind)
        if is_new:
            self._report(f"{what} cannot be stored: {why}; the run continues, and reports this error once")
