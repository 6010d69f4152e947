"""Progress of a run on the console: one line per step, and in a terminal a live bar below them."""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rich import progress as rich_progress
from rich.console import Console
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


class Progress:
    """Console view of a run. A context manager."""

    def __init__(self, *, total_steps: int, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._console = console or Console()
        self._step_ends: deque[float] = deque(maxlen=STEPS_OF_ETA + 1)
        self._bars = rich_progress.Progress(
            "{task.description}",
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._steps = self._bars.add_task("steps", total=total_steps)

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, *, completed_steps: int) -> None:
        """Start the clock of the first step."""
        self._bars.update(self._steps, completed=completed_steps)
        self._step_ends.append(time.monotonic())

    @contextmanager
    def rollout(self, *, num_trajectories: int) -> Generator[Callable[[object], None]]:
        """Show a rollout while the body runs; yield a callback to call with each trajectory that ended."""
        bar = self._bars.add_task("trajectories", total=num_trajectories)
        try:
            yield lambda _: self._bars.advance(bar)
        finally:
            self._bars.remove_task(bar)

    def end_step(self, step: int, metrics: Mapping[str, float], *, time_spent: str = "") -> None:
        """Show the metrics of a completed step."""
        self._bars.update(self._steps, completed=step)
        self._step_ends.append(time.monotonic())
        parts = [f"step {step}/{self._total_steps}"]
        parts += [
            f"{heading} {format(metrics[name], spec)}"
            for heading, (name, spec) in COLUMNS.items()
            if name in metrics
        ]
        per_step_s = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        parts.append(f"eta {datetime.timedelta(seconds=round(per_step_s * (self._total_steps - step)))}")
        self.say("  ".join(parts) + (f"\n  {time_spent}" if time_spent else ""))

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


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
