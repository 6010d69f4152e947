"""Tables of `agent-loop eval`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent_loop.training.evaluation.estimates import MeanEstimate
from agent_loop.training.evaluation.scores import Evaluation, Scores
from agent_loop.training.evaluation.summary import Comparison, EvaluationSummary
from agent_loop.trajectory import FailureKind

MAX_PROMPT_CHARACTERS = 60
INTERVAL = "95% interval"


def print_summary(summary: EvaluationSummary, *, console: Console, num_rows: int) -> None:
    """Print the scores of the first rows, of the categories and in total, and the comparison."""
    evaluation = summary.evaluation
    if num_rows:
        console.print(_row_table(evaluation, num_rows=num_rows))
    for column, categories in summary.categories.items():
        console.print(_category_table(column, categories))
    console.print(_total_table(evaluation))
    if summary.comparison is not None:
        console.print(_comparison_table(summary.comparison))


def _row_table(evaluation: Evaluation, *, num_rows: int) -> Table:
    hidden = len(evaluation.rows) - num_rows
    caption = f"and {hidden} more rows; --table-rows shows more" if hidden > 0 else None
    table = Table("row", "prompt", "samples", "correct", "mean reward", caption=caption)
    for result in evaluation.rows[:num_rows]:
        table.add_row(
            str(result.group),
            Text(_cut(result.prompt)),
            str(result.num_samples),
            str(result.num_correct),
            "-" if result.mean_reward is None else f"{result.mean_reward:.3f}",
        )
    return table


def _category_table(column: str, categories: Mapping[str, Scores]) -> Table:
    ks = sorted({1, *(max(scores.pass_at_k) for scores in categories.values())})
    table = Table()
    for header in (escape(column), "rows", "samples"):
        table.add_column(header, no_wrap=True)
    for measure in (*(f"pass@{k}" for k in ks), "mean reward"):
        table.add_column(measure)
    for name, scores in categories.items():
        counts = str(scores.num_rows), str(scores.num_samples)
        shares = (in_one(scores.pass_at_k.get(k), ".1%") for k in ks)
        table.add_row(Text(_cut(name)), *counts, *shares, in_one(scores.mean_reward, ".3f"))
    return table


def _total_table(evaluation: Evaluation) -> Table:
    scores = evaluation.scores
    table = Table("measure", "value", INTERVAL)
    table.add_row("rows", str(scores.num_rows))
    table.add_row("samples", str(scores.num_samples))
    if scores.num_scored < scores.num_samples:
        table.add_row("samples without a score", str(scores.num_samples - scores.num_scored))
    table.add_row("mean reward", *_cells(scores.mean_reward, ".3f"))
    for k, estimate in scores.pass_at_k.items():
        table.add_row(f"pass@{k}", *_cells(estimate, ".1%"))
    for reason, count in evaluation.stop_reasons.items():
        table.add_row(f"ended with {reason}", str(count))
    for kind, count in evaluation.failures.items():
        left_out = "" if kind == FailureKind.CODE else ", in no score"
        table.add_row(f"failed: {kind}{left_out}", str(count))
    for kind, count in evaluation.incidents.items():
        table.add_row(f"incidents: {kind}", str(count))
    return table


def _comparison_table(comparison: Comparison) -> Table:
    """Return the table of differences: green if the whole interval is above 0, red if it is below 0."""
    table = Table("rows of", "rows in both", title=Text(f"better than {comparison.path} by"))
    table.add_column("pass@1", no_wrap=True)
    table.add_column("mean reward", no_wrap=True)
    named = [("all", comparison.total)]
    for column, categories in comparison.categories.items():
        named += [(f"{column} = {name}", difference) for name, difference in categories.items()]
    for name, difference in named:
        share = Text(in_one(difference.pass_at_1, "+.1%"), style=colour_of(difference.pass_at_1))
        reward = Text(in_one(difference.mean_reward, "+.3f"), style=colour_of(difference.mean_reward))
        table.add_row(Text(_cut(name)), str(difference.num_rows), share, reward)
    return table


def _cells(estimate: MeanEstimate | None, spec: str) -> tuple[str, str]:
    """Return the value and its interval as texts."""
    if estimate is None:
        return "-", ""
    if estimate.low is None or estimate.high is None:
        return format(estimate.value, spec), ""
    return format(estimate.value, spec), f"{estimate.low:{spec}} .. {estimate.high:{spec}}"


def in_one(estimate: MeanEstimate | None, spec: str) -> str:
    """Return the value and its interval as one text, such as `0.5 (0.4 .. 0.6)`."""
    value, interval = _cells(estimate, spec)
    return f"{value} ({interval.replace('%', '')})" if interval else value


def colour_of(estimate: MeanEstimate | None) -> str:
    """Return the style of a difference: green if the whole interval is above 0, red if it is below 0."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return "green" if estimate.low > 0 else "red" if estimate.high < 0 else ""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PROMPT_CHARACTERS else text[: MAX_PROMPT_CHARACTERS - 1] + "…"
