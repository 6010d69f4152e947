"""Progress of a rollout: a bar on a console, and in a notebook an output that is updated."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
