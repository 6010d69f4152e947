"""Draw the success of training runs, one curve each.

    python docs/generate_curves.py docs/images/examples.svg chain=runs/chain calculator=runs/calculator

Each argument is a label and a folder of `python -m examples.run`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from agent_loop.training.metrics import SUCCESS_SHARE, read_metrics

WINDOW = 5
"""Number of steps that each point of a curve averages."""


def success_of(run: Path) -> list[float]:
    """Return the success on the training prompts of each step, smoothed."""
    values = [float(line[SUCCESS_SHARE]) for line in read_metrics(run / "train" / "metrics.jsonl")]
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def draw(path: Path, runs: dict[str, Path]) -> None:
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for label, run in runs.items():
        values = success_of(run)
        axes.plot(range(1, len(values) + 1), values, label=label, linewidth=1.6)
    axes.set(xlabel="training step", ylabel="success on training prompts", ylim=(0, 1.02))
    axes.grid(linewidth=0.4)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    target, *given = sys.argv[1:]
    draw(Path(target), {label: Path(run) for label, _, run in (item.partition("=") for item in given)})
