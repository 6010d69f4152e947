"""Progress of a run on the console: a live view in a terminal, else one plain line per step."""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from agent_loop.training import metrics as names

STEPS_OF_ETA = 20
"""Number of past steps from which the remaining time is estimated."""

COLUMNS: Mapping[str, tuple[str, str]] = {
    "reward": (names.REWARD_MEAN, ".3f"),
    "success": (names.SUCCESS_SHARE, ".1%"),
    "turns": (names.NUM_TURNS_MEAN, ".1f"),
    "response": (names.RESPONSE_LENGTH_MEAN, ".0f"),
    "loss": (names.SFT_LOSS, ".4f"),
    "val loss": (names.SFT_VALIDATION_LOSS, ".4f"),
    "tokens/s": (names.TOKENS_PER_SECOND, ".0f"),
    "val success": (f"{names.VALIDATION}{names.SUCCESS_SHARE}", ".1%"),
}
"""Columns of a step: heading, metric and format."""


@dataclass(slots=True, eq=False)
class _Rollout:
    num_trajectories: int
    num_done: int = 0

    def note(self, _: object) -> None:
        self.num_done += 1


class Progress:
    """Console view of a run. A context manager."""

    def __init__(self, *, total_steps: int, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._console = console or Console()
        self._step = 0
        self._latest: Mapping[str, float] = {}
        self._time_spent = ""
        self._step_ends: deque[float] = deque(maxlen=STEPS_OF_ETA + 1)
        self._rollouts: list[_Rollout] = []
        self._live = (
            Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, *, completed_steps: int) -> None:
        """Start the clock of the first step."""
        self._step = completed_steps
        self._step_ends.append(time.monotonic())

    @contextmanager
    def rollout(self, *, num_trajectories: int) -> Generator[Callable[[object], None]]:
        """Show a rollout while the body runs; yield a callback to call with each trajectory that ended."""
        rollout = _Rollout(num_trajectories)
        self._rollouts.append(rollout)
        try:
            yield rollout.note
        finally:
            self._rollouts.remove(rollout)

    def end_step(self, step: int, metrics: Mapping[str, float], *, time_spent: str = "") -> None:
        """Show the metrics of a completed step."""
        self._step = step
        self._time_spent = time_spent
        self._latest = {**self._latest, **metrics} if self._live is not None else metrics
        self._step_ends.append(time.monotonic())
        if self._live is None:
            parts = [f"step {step}/{self._total_steps}"]
            parts += [f"{heading} {value}" for heading, value in self._values().items()]
            parts += [f"eta {self._remaining()}"]
            self.say("  ".join(parts) + (f"\n  {time_spent}" if time_spent else ""))

    def say(self, text: str) -> None:
        """Print a line above the live view."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _values(self) -> dict[str, str]:
        return {
            heading: format(self._latest[name], spec)
            for heading, (name, spec) in COLUMNS.items()
            if name in self._latest
        }

    def _remaining(self) -> str:
        if len(self._step_ends) < 2:
            return "-"
        per_step_s = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return str(datetime.timedelta(seconds=round(per_step_s * (self._total_steps - self._step))))

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        cells = {"step": f"{self._step}/{self._total_steps}", **self._values(), "eta": self._remaining()}
        for heading in cells:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_row(*cells.values())
        rollouts = list(self._rollouts)  # a copy: the live view reads it from a thread of its own
        num_done = sum(rollout.num_done for rollout in rollouts)
        num_trajectories = sum(rollout.num_trajectories for rollout in rollouts)
        bar = Table.grid(expand=True)  # a bar on its own would not end its line
        bar.add_row(ProgressBar(total=self._total_steps, completed=self._step))
        return Group(
            bar,
            table,
            Text(f"trajectories {num_done}/{num_trajectories}   {self._time_spent}", style="dim"),
        )


@contextmanager
def without_progress_of_transformers() -> Generator[None]:
    """Disable the progress bars of `transformers` in the body, because they would break the live view."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
