"""`agent-loop eval`: how good is a model on rows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agent_loop.cli.arguments import (
    ConfigArgument,
    DataOption,
    MaxRowsOption,
    ModelOption,
    OverridesArgument,
    SamplesOption,
    read_config,
    read_rows,
)
from agent_loop.cli.running import by_id, run_rows
from agent_loop.rollout.records import write_records
from agent_loop.training.evaluation import Evaluation, RowResult, summarise
from agent_loop.trajectory import Trajectory

MAX_PROMPT_CHARACTERS = 60


def eval_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Keep the trajectories here, as JSON lines.", show_default=False),
    ] = None,
    model: ModelOption = None,
    data: DataOption = None,
    max_rows: MaxRowsOption = None,
    n: SamplesOption = None,
    table_rows: Annotated[int, typer.Option("--table-rows", min=0, help="Rows of the per-row table.")] = 50,
) -> None:
    """Evaluate a model: mean reward, success, pass@k and a table per row. Samples as `rollout.val` says.

    Examples:

        agent-loop eval config.yaml

        agent-loop eval config.yaml -n 8 --model runs/train/checkpoints/step-000080/model

        agent-loop eval config.yaml rollout.val.temperature=0 --max-rows 100 --out evaluated.jsonl
    """
    settings = read_config(config, overrides, model=model)
    rows = read_rows(settings, data=data, max_rows=max_rows)
    console = Console()
    finished: list[Trajectory] = []
    try:
        trajectories = asyncio.run(
            run_rows(settings, rows=rows, n=n, validate=True, console=console, finished=finished)
        )
    finally:
        if out is not None:
            write_records(out, sorted(finished, key=by_id))
    evaluation = summarise(trajectories, success_threshold=settings.reward.success_threshold)
    if table_rows:
        console.print(_row_table(evaluation, max_rows=table_rows))
    console.print(_summary(evaluation))


def _row_table(evaluation: Evaluation, *, max_rows: int) -> Table:
    hidden = len(evaluation.rows) - max_rows
    caption = f"and {hidden} more rows; --table-rows shows more" if hidden > 0 else None
    table = Table("row", "prompt", "samples", "correct", "mean reward", caption=caption)
    for result in evaluation.rows[:max_rows]:
        reward = "-" if result.mean_reward is None else f"{result.mean_reward:.3f}"
        cells = (
            str(result.group),
            _prompt_of(result),
            str(result.num_samples),
            str(result.num_correct),
            reward,
        )
        table.add_row(*cells)
    return table


def _summary(evaluation: Evaluation) -> Table:
    table = Table("measure", "value")
    table.add_row("trajectories", str(evaluation.num_trajectories))
    table.add_row("mean reward", "-" if evaluation.mean_reward is None else f"{evaluation.mean_reward:.3f}")
    table.add_row("success", f"{evaluation.success_share:.1%}")
    for k, share in evaluation.pass_at_k.items():
        table.add_row(f"pass@{k}", f"{share:.1%}")
    for reason, count in evaluation.stop_reasons.items():
        table.add_row(f"ended with {reason}", str(count))
    for kind, count in evaluation.incidents.items():
        table.add_row(f"incidents: {kind}", str(count))
    return table


def _prompt_of(result: RowResult) -> str:
    messages = result.row["raw_prompt"]
    text = " ".join(str(messages[-1].get("content", "")).split())
    return text if len(text) <= MAX_PROMPT_CHARACTERS else text[: MAX_PROMPT_CHARACTERS - 1] + "…"
