"""Table of stored trajectories: numbers, the parts of the reward, and texts as far as the terminal is wide enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from agent_loop.storage.query import HEADINGS
from agent_loop.storage.row_texts import ANSWER, PART_PREFIX, PROMPT, SOURCES, TARGET, text_columns
from agent_loop.storage.run import KEY, StoredRun

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
NUMBERS = frozenset(COLUMNS) - {"split", "trajectory_id", "stop_reason"}
TEXTS = {PROMPT: 5, ANSWER: 4, TARGET: 2}
"""Columns of texts, and their shares of the remaining width."""
MIN_TEXT_WIDTH = 30
"""Characters for all texts together. With less, no text is shown."""
MAX_PARTS = 6
GAP = 1
"""Spaces between columns."""


def table_of(found: Any, run: StoredRun, *, width: int) -> Table:
    """Return the table of these trajectories.

    Args:
        found: Scalar columns of the trajectories, as a pyarrow Table.
        run: The run, from which the texts and reward parts are read.
        width: Characters per line.
    """
    names = [name for name in COLUMNS if name in ALWAYS or any(found[name].to_pylist())]
    rows = found.select(names).to_pylist()
    keys = list(zip(*(found[name].to_pylist() for name in KEY), strict=True))
    more = _texts_of(run, keys)
    parts = list(dict.fromkeys(name for row in more for name in row if name.startswith(PART_PREFIX)))
    shown = [[name, *parts[:MAX_PARTS]] if name == "reward" else [name] for name in names]
    names = [name for group in shown for name in group]
    cells = [
        [_cell(value.get(name)) for name in names]
        for value in ({**row, **texts} for row, texts in zip(rows, more, strict=True))
    ]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    headings = [_heading(name) for name in names]
    for name, heading in zip(names, headings, strict=True):
        is_number = name in NUMBERS or name.startswith(PART_PREFIX)
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=not is_number)
    taken = sum(max(map(len, column)) + GAP for column in zip(headings, *cells, strict=True))
    widths = _text_widths(more, remaining=width - taken)
    for name in widths:
        table.add_column(_heading(name), no_wrap=True)
    for row, texts in zip(cells, more, strict=True):
        table.add_row(*map(Text, row), *(_clipped(texts.get(name), widths[name]) for name in widths))
    return table


def _texts_of(run: StoredRun, keys: Sequence[tuple[str, int, str]]) -> list[Mapping[str, Any]]:
    """Return the texts and reward parts of the trajectories with these keys."""
    found: dict[tuple[str, int, str], Mapping[str, Any]] = {}
    wanted = set(keys)
    for split, step in dict.fromkeys((split, step) for split, step, _ in keys):
        stored = run.scalars(split=split, step=step, columns=(*KEY, *SOURCES))
        rows = [tuple(row[name] for name in KEY) in wanted for row in stored.select(KEY).to_pylist()]
        stored = stored.filter(rows)
        texts = {name: column.to_pylist() for name, column in text_columns(stored).items()}
        for number, row in enumerate(stored.select(KEY).to_pylist()):
            key = row["split"], row["step"], row["trajectory_id"]
            found[key] = {
                name: values[number] for name, values in texts.items() if values[number] is not None
            }
    return [found.get(key, {}) for key in keys]


def _text_widths(rows: Sequence[Mapping[str, Any]], *, remaining: int) -> dict[str, int]:
    """Return the width of each column of texts that has a value; empty if the terminal is too narrow for texts."""
    longest = {name: max((len(row.get(name, "")) for row in rows), default=0) for name in TEXTS}
    longest = {name: max(length, len(_heading(name))) for name, length in longest.items() if length}
    remaining -= GAP * len(longest)
    if remaining < min(MIN_TEXT_WIDTH, sum(longest.values())):
        return {}
    widths: dict[str, int] = {}
    # The shortest first, because what a short text does not need is for the longer ones.
    for name in sorted(longest, key=longest.__getitem__):
        share = remaining * TEXTS[name] // sum(TEXTS[other] for other in longest if other not in widths)
        widths[name] = min(longest[name], share)
        remaining -= widths[name]
    return {name: widths[name] for name in TEXTS if widths.get(name)}


def _heading(name: str) -> str:
    headings = {column: heading for heading, column in HEADINGS.items()} | {ANSWER: "last answer"}
    return headings.get(name, name.removeprefix(PART_PREFIX))


def _clipped(text: str | None, width: int) -> Text:
    text = text or "-"
    return Text(text if len(text) <= width else f"{text[: width - 1]}…")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
