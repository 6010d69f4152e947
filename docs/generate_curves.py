"""Draw the success of training runs, one curve each.

    python docs/generate_curves.py docs/images/examples.svg chain=runs/chain calculator=runs/calculator
    python docs/generate_curves.py docs/images/environments.svg poker=runs/poker@val/pass@1

Each argument is a label and a folder of `python -m examples.run`, and after `@` another metric than the success on
training prompts. Curves with the same label have the same colour.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from agent_loop.training.metrics import SUCCESS_SHARE, read_metrics

WINDOW = 5
"""Number of steps that each point of a curve averages."""
MIN_SMOOTHED = 20
"""Curves with at most this many points are not smoothed."""


def curve_of(run: Path, metric: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a metric was measured, and its values, smoothed."""
    lines = [line for line in read_metrics(run / "train" / "metrics.jsonl") if metric in line]
    values = [float(line[metric]) for line in lines]
    window = WINDOW if len(values) > MIN_SMOOTHED else 1
    windows = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [line["step"] for line in lines], [sum(each) / len(each) for each in windows]


def draw(path: Path, curves: list[tuple[str, Path, str]]) -> None:
    """Draw curves, each with a label, the folder of a run and a metric."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for label, run, metric in curves:
        colour = colours.get(label)
        [line] = axes.plot(*curve_of(run, metric), label="" if colour else label, linewidth=1.6, color=colour)
        colours.setdefault(label, line.get_color())
    axes.set(xlabel="training step", ylabel="success", ylim=(0, 1.02))
    axes.grid(linewidth=0.4)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def parse(argument: str) -> tuple[str, Path, str]:
    label, _, place = argument.partition("=")
    run, _, metric = place.partition("@")
    return label, Path(run), metric or SUCCESS_SHARE


if __name__ == "__main__":
    target, *given = sys.argv[1:]
    draw(Path(target), list(map(parse, given)))
