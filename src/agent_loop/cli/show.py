"""`agent-loop show`: print the stored trajectories of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_loop.cli.arguments import (
    WIDTH_WITHOUT_TERMINAL,
    RunArgument,
    SplitOption,
    StepOption,
    WhereOption,
    find_run,
    nothing_stored,
)
from agent_loop.cli.show_trajectory import print_trajectory
from agent_loop.cli.verbosity import print_line
from agent_loop.errors import DataError
from agent_loop.storage.query import HEADINGS, Condition, find
from agent_loop.storage.row_texts import ANSWER, PART_PREFIX, PROMPT, SOURCES, TARGET, text_columns
from agent_loop.storage.run import KEY, StoredRun
from agent_loop.trajectory import mean_over_rollouts

COLUMNS = (
    "step",
    "split",
    "trajectory_id",
    "reward",
    "advantage",
    "stop_reason",
    "num_assistant_turns",
    "num_tool_calls",
    "num_failed_calls",
    "num_incidents",
    "num_model_tokens",
    "seconds",
)
"""Columns of the table before the texts."""
ALWAYS = frozenset({"step", "split", "trajectory_id", "reward", "stop_reason"})
"""Columns that are shown even if all values are empty or 0."""
WORDS = frozenset({"split", "trajectory_id", "stop_reason"})
MIN_TEXT_WIDTH = 30
"""Characters for all texts together. With less, no text is shown."""
MAX_PARTS = 6


def show_command(
    run: RunArgument,
    *,
    step: StepOption = None,
    split: SplitOption = None,
    row: Annotated[
        str | None,
        typer.Option("--row", help="Show this trajectory turn by turn, as in `group=3/rollout=1`."),
    ] = None,
    where: WhereOption = None,
    text: Annotated[
        str | None, typer.Option("--text", help="Only trajectories whose messages contain this text.")
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", help="Column to sort by; put `-` before it for the largest first.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum rows of the table.")] = 50,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With `--row`: each token, coloured by origin and log-prob.")
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
    console.print(_table(found.slice(0, limit), stored, console))
    print_line(console, _summary(found, num_shown=min(limit, found.num_rows)))


def find_row(run: StoredRun, row: str, *, split: str | None, step: int | None) -> dict[str, Any]:
    """Return the trajectory with this name: the one of the latest step, and of training before validation."""
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


def _table(found: Any, run: StoredRun, console: Console) -> Table:
    """Return the table of trajectories: numbers, parts of the reward, and texts if the console is wide enough."""
    texts = _texts_of(run, list(zip(*(found[name].to_pylist() for name in KEY), strict=True)))
    names = [name for name in COLUMNS if name in ALWAYS or any(found[name].to_pylist())]
    rows = [{**row, **more} for row, more in zip(found.select(names).to_pylist(), texts, strict=True)]
    parts = dict.fromkeys(name for more in texts for name in more if name.startswith(PART_PREFIX))
    after = names.index("reward") + 1
    names[after:after] = [*parts][:MAX_PARTS]
    headings = {column: heading for heading, column in HEADINGS.items()} | {ANSWER: "last answer"}

    def make(shares: Mapping[str, int]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=bool(shares))
        for name in names:
            heading = headings.get(name, name.removeprefix(PART_PREFIX))
            is_text = name in WORDS
            table.add_column(heading, justify="left" if is_text else "right", no_wrap=is_text)
        for name, share in shares.items():
            table.add_column(headings.get(name, name), ratio=share, no_wrap=True, overflow="ellipsis")
        for row in rows:
            table.add_row(*(Text(_cell(row.get(name))) for name in (*names, *shares)))
        return table

    shares = {PROMPT: 5, ANSWER: 4, TARGET: 2}
    shares = {name: share for name, share in shares.items() if any(name in more for more in texts)}
    numbers = make({})
    fits = console.width - console.measure(numbers).maximum >= MIN_TEXT_WIDTH
    return make(shares) if shares and fits else numbers


def _texts_of(run: StoredRun, keys: Sequence[tuple[str, int, str]]) -> list[Mapping[str, Any]]:
    """Return the texts and the parts of the reward of trajectories."""
    found: dict[tuple[str, int, str], Mapping[str, Any]] = {}
    for split, step in dict.fromkeys((split, step) for split, step, _ in keys):
        stored = run.scalars(split=split, step=step, columns=(*KEY, *SOURCES))
        texts = {name: column.to_pylist() for name, column in text_columns(stored).items()}
        for number, trajectory_id in enumerate(stored["trajectory_id"].to_pylist()):
            values = {name: column[number] for name, column in texts.items()}
            found[split, step, trajectory_id] = {
                name: value for name, value in values.items() if value is not None
            }
    return [found.get(key, {}) for key in keys]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
