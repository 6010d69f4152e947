"""`agent-loop show`: print the stored trajectories of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agent_loop.cli.arguments import (
    WIDTH_WITHOUT_TERMINAL,
    RunArgument,
    SplitOption,
    StepOption,
    WhereOption,
    find_run,
    nothing_stored,
)
from agent_loop.errors import DataError
from agent_loop.trajectory import mean_over_rollouts

if TYPE_CHECKING:
    from agent_loop.storage.run import StoredRun


def show_command(
    run: RunArgument,
    *,
    step: StepOption = None,
    split: SplitOption = None,
    row: Annotated[
        str | None,
        typer.Option(
            "--row", help="Show this trajectory turn by turn, as in `group=3/rollout=1`.", show_default=False
        ),
    ] = None,
    where: WhereOption = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", help="Only trajectories whose messages contain this text.", show_default=False
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", help="Column to sort by; put `-` before it for the largest first.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum rows of the table.")] = 50,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="With `--row`: each token, coloured by origin and log-prob."),
    ] = False,
) -> None:
    """Print a table of stored trajectories, or a single trajectory with `--row`.

    RUN is the folder of a run, a folder of Parquet files, or a Parquet file. A wide terminal also shows the texts: the
    prompt's last message, the last answer and the target.

    Examples:

        agent-loop show runs/train

        agent-loop show runs/train --step 12 --where 'reward<1' --sort -seconds --limit 10

        agent-loop show runs/train --text "cannot divide" --where num_failed_calls>0

        agent-loop show runs/train --step 12 --row group=3/rollout=1 --tokens
    """
    # late: keeps `--help` quick
    from agent_loop.cli.show_table import table_of
    from agent_loop.cli.show_trajectory import print_trajectory
    from agent_loop.storage.query import Condition, find
    from agent_loop.storage.run import StoredRun

    stored, console = StoredRun(find_run(run)), Console()
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    if row is not None:
        print_trajectory(
            find_row(stored, row, split=split, step=step), console, pieces=stored.vocabulary(), tokens=tokens
        )
        return
    if tokens:
        raise DataError("--tokens prints the tokens of one trajectory; give the trajectory with --row")
    conditions = [Condition.parse(each) for each in where or ()]
    found = find(stored, split=split, step=step, where=conditions, text=text, sort=sort)
    if not found.num_rows and not stored.scalars(split=split, step=step, columns=("step",)).num_rows:
        raise nothing_stored(stored, step=step, split=split)
    console.print(table_of(found.slice(0, limit), stored, width=console.width))
    console.print(_summary(found, num_shown=min(limit, found.num_rows)), markup=False, highlight=False)


def find_row(run: StoredRun, row: str, *, split: str | None, step: int | None) -> dict[str, Any]:
    """Return the trajectory with this name: the one of the latest step, and of training before validation.

    Raises:
        DataError: There is no such trajectory.
    """
    table = run.scalars(split=split, step=step, columns=("step", "split", "trajectory_id"))
    if not table.num_rows:
        raise nothing_stored(run, step=step, split=split)
    keys = [key for key in table.to_pylist() if key["trajectory_id"] == row]
    if not keys:
        names = sorted({key["trajectory_id"] for key in table.to_pylist()})
        some = ", ".join(names[:3]) or "none"
        raise DataError(
            f"there is no trajectory {row!r} (there are {len(names)}: {some} ...); see `agent-loop show`"
        )
    latest = max(keys, key=lambda key: (key["step"], key["split"] == "train"))
    return run.trajectory(latest["split"], latest["step"], row)


def _summary(found: Any, *, num_shown: int) -> str:
    """Return the number of trajectories and the mean reward of rollouts, in which branches share the weight."""
    rows = found.select(("split", "step", "group", "rollout", "branch", "reward")).to_pylist()
    mean_reward = mean_over_rollouts(
        (
            None if row["branch"] is None else (row["split"], row["step"], row["group"], row["rollout"]),
            row["reward"],
        )
        for row in rows
    )
    mean = "" if mean_reward is None else f", mean reward {mean_reward:.3f}"
    more = "" if num_shown == found.num_rows else f", {num_shown} shown (--limit)"
    return f"{found.num_rows} trajectories{mean}{more}"
