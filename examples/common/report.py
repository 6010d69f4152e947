"""Report of a run: training curves, a table of answers, and whole trajectories token by token."""

from __future__ import annotations

import base64
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent_loop.training.evaluation.scores import summarise
from agent_loop.trajectory import Trajectory
from agent_loop.types import Origin

NUM_COMPARED = 10
"""Number of rows in the table of answers."""
NUM_SHOWN = 3
"""Number of prompts whose trajectories are shown in full."""
MAX_ANSWER_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class TargetResult:
    """Whether the run reached the targets of its recipe."""

    is_passed: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class ReportInput:
    """Contents of a report."""

    title: str
    subtitle: str
    verdict: TargetResult
    before: Sequence[Trajectory]
    after: Sequence[Trajectory]
    """Trajectories of the same rows as `before`, in the same order."""
    success_threshold: float
    metrics: Sequence[Mapping[str, Any]]
    """One mapping per training step."""
    right_answer: Callable[[Mapping[str, Any]], str]
    """Function that returns the right answer of a row."""
    decode: Callable[[Sequence[int]], str]
    """Function that converts token ids to text, including control tokens."""

    def success_share(self, trajectories: Sequence[Trajectory]) -> float:
        return summarise(trajectories, success_threshold=self.success_threshold).success_share

    def is_success(self, trajectory: Trajectory) -> bool:
        return trajectory.reward is not None and trajectory.reward >= self.success_threshold


@dataclass(frozen=True, slots=True)
class TokenView:
    """A token on the page."""

    text: str
    origin: str
    hover: str


@dataclass(frozen=True, slots=True)
class AttemptView:
    """A trajectory on the page."""

    is_right: bool
    answer: str
    calls: str
    stop_reason: str
    num_model_tokens: int
    tokens: Sequence[TokenView]


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Trajectories of the same prompt before and after training."""

    question: str
    right_answer: str
    before: AttemptView
    after: AttemptView


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A number before and after training, as text."""

    name: str
    before: str
    after: str


def write_report(report: ReportInput, *, folder: Path) -> Path:
    """Write `curves.png` and `report.html`, and return the path of `report.html`.

    Without Matplotlib, there are no curves.
    """
    curves = _curves(report) if find_spec("matplotlib") else {}
    if curves:
        (folder / "curves.png").write_bytes(curves["light"])
    comparisons = _compare(report)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("report.html.jinja").render(
        title=report.title,
        subtitle=report.subtitle,
        verdict=report.verdict,
        figures=key_figures(report),
        curves={name: base64.b64encode(image).decode() for name, image in curves.items()},
        curves_alt=f"Success on training prompts over {len(report.metrics)} steps: {report.verdict.sentence}.",
        comparisons=comparisons[:NUM_COMPARED],
        trajectories=[line for line in comparisons if not line.before.is_right][:NUM_SHOWN],
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _curves(report: ReportInput) -> dict[str, bytes]:
    """Return the plots of the run as PNG, on a light and on a dark page."""
    from examples.common.curves import (
        DARK,
        LIGHT,
        PANELS,
        HeldOut,
        draw_curves,
    )  # late: Matplotlib is optional

    held_out = HeldOut(before=report.success_share(report.before), after=report.success_share(report.after))
    return {
        name: draw_curves(report.metrics, panels=PANELS, held_out=held_out, theme=theme)
        for name, theme in (("light", LIGHT), ("dark", DARK))
    }


def print_comparison(report: ReportInput, *, console: Console) -> None:
    """Print the table of answers and the key figures."""
    answers = Table("prompt", "right", "before", "after", title="The first held-out prompts", box=SIMPLE_HEAD)
    for line in _compare(report)[:NUM_COMPARED]:
        answers.add_row(
            escape(line.question), escape(line.right_answer), _marked(line.before), _marked(line.after)
        )
    console.print(answers)
    figures = Table("", "before", "after", title="All held-out prompts", box=SIMPLE_HEAD)
    for figure in key_figures(report):
        figures.add_row(figure.name, figure.before, figure.after)
    console.print(figures)


def key_figures(report: ReportInput) -> list[KeyFigure]:
    """Return success, tool calls and sampled tokens, over all trajectories."""

    def both(name: str, measure: Callable[[Sequence[Trajectory]], str]) -> KeyFigure:
        return KeyFigure(name, before=measure(report.before), after=measure(report.after))

    return [
        both("Success", lambda group: f"{report.success_share(group):.1%}"),
        both("Tool calls each", lambda group: f"{fmean(t.output.metrics.num_tool_calls for t in group):.2f}"),
        both("Sampled tokens each", lambda group: f"{fmean(_num_model_tokens(t) for t in group):.1f}"),
    ]


def _compare(report: ReportInput) -> list[PromptComparison]:
    """Return a comparison of every row's first sample."""
    return [
        PromptComparison(
            question=str(before.row["raw_prompt"][-1]["content"]),
            right_answer=report.right_answer(before.row),
            before=_attempt(before, report),
            after=_attempt(after, report),
        )
        for before, after in zip(report.before, report.after, strict=True)
        if before.rollout == 0
    ]


def _attempt(trajectory: Trajectory, report: ReportInput) -> AttemptView:
    output = trajectory.output
    num_calls = output.metrics.num_tool_calls
    return AttemptView(
        is_right=report.is_success(trajectory),
        answer=textwrap.shorten(output.answer, MAX_ANSWER_CHARACTERS, placeholder=" ...") or "(nothing)",
        calls=f"{num_calls} call{'' if num_calls == 1 else 's'}",
        stop_reason=str(output.stop_reason).replace("_", " "),
        num_model_tokens=_num_model_tokens(trajectory),
        tokens=list(_tokens(trajectory, decode=report.decode)),
    )


def _tokens(trajectory: Trajectory, *, decode: Callable[[Sequence[int]], str]) -> Iterator[TokenView]:
    for segment in trajectory.output.segments:
        for index, token_id in enumerate(segment.token_ids.tolist()):
            hover = f"token {token_id}"
            if segment.logprobs is not None:
                logprob = float(segment.logprobs[index])
                hover += f", log-prob {logprob:.3f} ({math.exp(logprob):.1%})"
            text = decode([token_id]).replace("\n", "↵\n")
            yield TokenView(text=text, origin=str(segment.origin), hover=hover)


def _num_model_tokens(trajectory: Trajectory) -> int:
    return sum(len(segment) for segment in trajectory.output.segments if segment.origin is Origin.MODEL)


def _marked(attempt: AttemptView) -> str:
    colour, mark = ("green", "✓") if attempt.is_right else ("red", "✗")
    return f"[{colour}]{mark}[/] {escape(attempt.answer)}"
