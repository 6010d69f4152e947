"""Rollouts, evaluations and trainings of a configuration, from code that is async or not."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias, TypeVar, overload

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agent_loop.api.html import batch_html, summary, trajectory_html
from agent_loop.config import Config, load_config, parse_section
from agent_loop.distributed import create_manager
from agent_loop.errors import ConfigError
from agent_loop.rollout.rows import load_rows, prepare_rows
from agent_loop.training.evaluation.scores import Evaluation, summarise
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.progress import without_progress_of_transformers
from agent_loop.training.run import TrainResult
from agent_loop.trajectory import Trajectory, mean_over_rollouts
from agent_loop.types import Row

ConfigLike: TypeAlias = Config | Mapping[str, Any] | str | Path
"""Settings, or the sections of a YAML file as mappings, or the path of such a file."""
RowsLike: TypeAlias = Sequence[Mapping[str, Any]] | Sequence[str] | str
"""Rows, each with a `prompt` (text or messages), or sources of rows as in `data.train_files`."""


@dataclass(frozen=True, slots=True, repr=False)
class Rollout(Sequence[Trajectory]):
    """Trajectories of a rollout, ordered by group and rollout. A notebook shows them as a page."""

    trajectories: Sequence[Trajectory]
    tokens: Mapping[int, str]
    """Text of each token id that occurs."""

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> Rollout: ...
    def __getitem__(self, index: int | slice) -> Trajectory | Rollout:
        if isinstance(index, slice):
            return Rollout(self.trajectories[index], self.tokens)
        return self.trajectories[index]

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the scored rollouts; None if none is scored."""
        return mean_over_rollouts(
            (None if t.branch is None else (t.group, t.rollout), t.reward) for t in self.trajectories
        )

    def show(self, index: int) -> TrajectoryPage:
        """Return the page of one trajectory, for the last line of a cell."""
        return TrajectoryPage(self.trajectories[index], self.tokens)

    def __repr__(self) -> str:
        return f"Rollout of {len(self)} trajectories, mean reward {self.mean_reward}"

    def _repr_html_(self) -> str:
        return batch_html(self.trajectories, tokens=self.tokens)


@dataclass(frozen=True, slots=True, repr=False)
class TrajectoryPage:
    """Messages of a trajectory, and its tokens coloured by origin and log-prob. A notebook shows it as a page."""

    trajectory: Trajectory
    tokens: Mapping[int, str]
    """Text of each token id that occurs."""

    def __repr__(self) -> str:
        return summary(self.trajectory)

    def _repr_html_(self) -> str:
        return trajectory_html(self.trajectory, tokens=self.tokens)


async def rollout(
    config: ConfigLike, rows: RowsLike | None = None, *, n: int | None = None, console: Console | None = None
) -> Rollout:
    """Run `n` trajectories per row and return them, scored by the reward of the configuration.

    Args:
        config: The settings.
        rows: The rows; None reads `data.train_files`.
        n: Trajectories per row; None is `rollout.n`.
        console: Console of the progress bar; None is standard output, or the notebook.

    Raises:
        ConfigError: A setting is wrong, or something that it names does not exist.
        DataError: A row is wrong, or there are no rows.
        RolloutError: Too many trajectories failed.
    """
    return await _run(_settings(config), rows, n=n, validate=False, console=console)


async def evaluate(
    config: ConfigLike, rows: RowsLike | None = None, *, n: int | None = None, console: Console | None = None
) -> Evaluation:
    """Return pass@k and rewards of a model on rows, with 95% confidence intervals.

    Args:
        config: The settings. Completions are sampled with those of `rollout.val`.
        rows: The rows; None reads `data.val_files`.
        n: Trajectories per row; None is `rollout.val.n`.
        console: Console of the progress bar; None is standard output, or the notebook.

    Raises:
        ConfigError, DataError, RolloutError: See `rollout`.
    """
    settings = _settings(config)
    found = await _run(settings, rows, n=n, validate=True, console=console)
    return summarise(found.trajectories, success_threshold=settings.reward.success_threshold)


def rollout_sync(
    config: ConfigLike, rows: RowsLike | None = None, *, n: int | None = None, console: Console | None = None
) -> Rollout:
    """Run `rollout` to its end, from code that is not async; works in a notebook too."""
    return run_sync(lambda: rollout(config, rows, n=n, console=console))


def evaluate_sync(
    config: ConfigLike, rows: RowsLike | None = None, *, n: int | None = None, console: Console | None = None
) -> Evaluation:
    """Run `evaluate` to its end, from code that is not async; works in a notebook too."""
    return run_sync(lambda: evaluate(config, rows, n=n, console=console))


class Trainer:
    """Training of one run. Single use.

    Args:
        config: The settings.
        resume: False, True, `auto` or a path, as in `PPOTrainer`.
        overwrite: Remove the files of an earlier run in `trainer.run_dir`.
        console: Console that shows the progress; None is standard output, or the notebook.
    """

    def __init__(
        self,
        config: ConfigLike,
        *,
        resume: bool | str = False,
        overwrite: bool = False,
        console: Console | None = None,
    ) -> None:
        self._trainer = PPOTrainer(_settings(config), resume=resume, overwrite=overwrite, console=console)

    async def fit(self) -> TrainResult:
        """Train until `trainer.total_steps`, or until Ctrl-C; see `PPOTrainer.fit` for the errors."""
        return await self._trainer.fit()

    def fit_sync(self) -> TrainResult:
        """Run `fit` to its end, from code that is not async; works in a notebook too."""
        return run_sync(self.fit)


async def _run(
    config: Config, rows: RowsLike | None, *, n: int | None, validate: bool, console: Console | None
) -> Rollout:
    prepared = _rows(config, rows, validate=validate)
    num_samples = n or (config.rollout.val.n if validate else config.rollout.n)
    ended: set[tuple[int, int]] = set()
    with without_progress_of_transformers(), counting(len(prepared) * num_samples, console=console) as show:

        def count(trajectory: Trajectory) -> None:
            ended.add((trajectory.group, trajectory.rollout))
            show(len(ended))

        async with create_manager(config) as manager:
            trajectories = await manager.run(prepared, n=n, validate=validate, on_trajectory=count)
            tokenizer = manager.template.tokenizer
    ids = {int(token_id) for t in trajectories for s in t.output.segments for token_id in s.token_ids}
    return Rollout(trajectories, {token_id: str(tokenizer.decode([token_id])) for token_id in sorted(ids)})


def _settings(config: ConfigLike) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return parse_section(Config, config, where="the settings given")
    return load_config(config)


def _rows(config: Config, rows: RowsLike | None, *, validate: bool) -> Sequence[Row]:
    data = config.data
    if rows is None:
        key, rows = ("data.val_files", data.val_files) if validate else ("data.train_files", data.train_files)
        if not rows:
            raise ConfigError(f"{key} is empty and no rows are given; give rows, or set {key}")
    names = [rows] if isinstance(rows, str) else [source for source in rows if isinstance(source, str)]
    if names:
        return load_rows(names, prompt_key=data.prompt_key, workspace=data.workspace)
    return prepare_rows(rows, prompt_key=data.prompt_key)


ResultT = TypeVar("ResultT")


def run_sync(make: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Run the coroutine that `make` returns to its end and return its result.

    If an event loop is running in this thread, the coroutine runs on a loop of its own in another thread. Ctrl-C
    cancels the coroutine and waits for it, then raises KeyboardInterrupt.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []
    result: Future[ResultT] = Future()

    async def main() -> ResultT:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await make()

    def run() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001  (raised in the thread of the caller)
            result.set_exception(error)

    thread = Thread(target=run, name="agent-loop-sync", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        for loop, task in running:
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return result.result()


REFRESH_S = 0.2
"""Shortest time between two updates in a notebook."""


@contextmanager
def counting(total: int, *, console: Console | None) -> Generator[Callable[[int], None]]:
    """Show how many of `total` trajectories have ended. Yield a function that takes their number.

    Args:
        total: The number of trajectories.
        console: Console of the bar; None is standard output, or the notebook.
    """
    if console is None and _is_notebook():
        yield _NotebookBar(total).show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("trajectories", total=total)
        yield lambda completed: progress.update(task, completed=completed)


def _is_notebook() -> bool:
    """Return whether a kernel of Jupyter runs this code. Rich's own bar would need ipywidgets there."""
    shell: Any = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


class _NotebookBar:
    def __init__(self, total: int) -> None:
        display: Any = import_module("IPython.display").display  # late: comes with the notebook
        self._total = total
        self._began_at = self._shown_at = time.monotonic()
        self._completed = 0
        self._handle: Any = display(self, display_id=True)

    def show(self, completed: int) -> None:
        self._completed = completed
        if completed == self._total or time.monotonic() - self._shown_at >= REFRESH_S:
            self._shown_at = time.monotonic()
            self._handle.update(self)

    def __repr__(self) -> str:
        seconds = time.monotonic() - self._began_at
        return f"trajectories {self._completed}/{self._total}, {seconds:.1f} s"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self._completed}" max="{self._total}"></progress>'
        return f"<div>{bar} {self!r}</div>"
