"""Plots of training curves."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agent_loop.training.metrics import REWARD_MEAN, SUCCESS_SHARE, TOOL_CALLS_MEAN

SMOOTHING_STEPS = 5


@dataclass(frozen=True, slots=True)
class Theme:
    page: str
    text: str
    grid: str
    main: str
    other: str


LIGHT = Theme(page="#ffffff", text="#1c1e21", grid="#d9dbdd", main="#2f62b8", other="#a85b00")
DARK = Theme(page="#1c1f23", text="#e9e9e6", grid="#363a40", main="#86b0ff", other="#ffc46b")


@dataclass(frozen=True, slots=True)
class Panel:
    """Plot of one metric."""

    key: str
    """Name of the metric in `metrics.jsonl`."""
    title: str
    is_share: bool = False


PANELS = (
    Panel(SUCCESS_SHARE, "Success", is_share=True),
    Panel(REWARD_MEAN, "Mean reward"),
    Panel(TOOL_CALLS_MEAN, "Tool calls per trajectory"),
)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Success on held-out prompts before the first and after the last step."""

    before: float
    after: float


def draw_curves(
    metrics: Sequence[Mapping[str, Any]], *, panels: Sequence[Panel], held_out: HeldOut, theme: Theme = LIGHT
) -> bytes:
    """Return a PNG with one plot per panel, over the training steps.

    The first panel also shows the success on held-out prompts.
    """
    figure = Figure(figsize=(4.8 * len(panels), 3.6), dpi=144, facecolor=theme.page, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes: list[Axes] = list(figure.subplots(1, len(panels), squeeze=False)[0])
    for axes, panel in zip(all_axes, panels, strict=True):
        values = [float(line[panel.key]) for line in metrics]
        steps = range(1, len(values) + 1)
        axes.plot(steps, values, color=theme.main, alpha=0.35, linewidth=1.0)
        axes.plot(steps, _smoothed(values), color=theme.main, linewidth=2.0, label="training prompts")
        _style(axes, panel, theme)
    first = all_axes[0]
    first.plot(
        [0, len(metrics)],
        [held_out.before, held_out.after],
        color=theme.other,
        linestyle="none",
        marker="D",
        markersize=7,
        label="held-out prompts",
        clip_on=False,
        zorder=5,
    )
    first.legend(loc="lower right", frameon=False, labelcolor=theme.text)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", facecolor=theme.page)
    return picture.getvalue()


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean of the last `SMOOTHING_STEPS` values."""
    windows = [values[max(0, end - SMOOTHING_STEPS) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _style(axes: Axes, panel: Panel, theme: Theme) -> None:
    axes.set_facecolor(theme.page)
    axes.set_title(panel.title, color=theme.text, fontsize=11, loc="left")
    axes.set_xlabel("training step", color=theme.text)
    axes.tick_params(colors=theme.text)
    axes.grid(color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if panel.is_share:
        axes.set_ylim(0.0, 1.02)
