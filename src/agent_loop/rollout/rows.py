"""Load the rows of a data set, and select the rows of each step."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np

from agent_loop.chat.messages import normalise_messages, without_added_nulls
from agent_loop.environments.tasks import environment_rows
from agent_loop.errors import ConfigError, DataError
from agent_loop.files.plain_values import merge_mappings
from agent_loop.loading import load_object
from agent_loop.rollout.row_files import find_shards, number_rows
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.types import Message, Row
from agent_loop.workspaces.settings import workspace_mapping

RowT = TypeVar("RowT")
NO_SETTINGS: Mapping[str, Any] = {}
RESERVED_COLUMNS = frozenset({"self", "sampling_params"})
"""Arguments of `AgentLoopBase.run` that no column may have the name of."""
TIMEOUT_COLUMN = "trajectory_timeout_s"
"""Column with a row's own `rollout.trajectory_timeout_s`, which counts if it is shorter."""
_OTHERS = 1
"""Part of the seed that separates the random order of replacements from the order of an epoch."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows, or another source, and its rows."""

    name: str
    rows: Sequence[dict[str, Any]]
    """The rows, each with `raw_prompt`, a list of messages."""


def load_rows(
    sources: Sequence[str] | str, *, prompt_key: str = "prompt", workspace: Mapping[str, Any] = NO_SETTINGS
) -> list[dict[str, Any]]:
    """Return the rows of all sources, in the order of the sources. Each row gets `raw_prompt`, a list of messages.

    Args:
        sources: One source or several: `.jsonl`, `.json` (a list of rows), `.csv`, `.parquet` or `.arrow` files;
            folders or globs of such files; folders saved by `datasets`; folders of tasks in Harbor's form; names of
            tasks (`suite:task?option=value`); or `file.py:function`, which returns rows.
        prompt_key: The column with the messages, or with the text of one user message. A row that has
            `raw_prompt` already needs no such column.
        workspace: Settings that are merged over the column `workspace` of every row.

    Raises:
        ConfigError: The kind of a source is unknown, the function does not exist, or `workspace` is wrong.
        DataError: A file is missing or unreadable, files of one source do not fit together, a row has no prompt or an
            invalid prompt, or there are no rows.
    """
    sources = [sources] if isinstance(sources, str) else sources
    files = load_row_files(sources, prompt_key=prompt_key, workspace=workspace)
    return [row for file in files for row in file.rows]


def load_row_files(
    sources: Sequence[str], *, prompt_key: str, workspace: Mapping[str, Any] = NO_SETTINGS
) -> list[RowFile]:
    """Return what `load_rows` returns, file by file."""
    files = [file for source in sources for file in _load(source, prompt_key=prompt_key, workspace=workspace)]
    if not any(file.rows for file in files):
        names = ", ".join(sources) or "an empty list of sources"
        raise DataError(f"there are no rows in {names}; give at least one file or function with rows")
    return files


def prepare_rows(rows: Iterable[Any], *, prompt_key: str) -> list[dict[str, Any]]:
    """Prepare rows that are in memory. Each row gets `raw_prompt`, as in `load_rows`."""
    prepared = [
        _with_prompt(row, where=where, prompt_key=prompt_key)
        for where, row in number_rows("the data set", _plain_rows(rows))
    ]
    if not prepared:
        raise DataError("there are no rows; give at least one")
    return prepared


@dataclass(frozen=True, slots=True)
class RowSampler(Generic[RowT]):
    """Sampler of the rows of each step. The selection depends on the step alone, so that a run can be resumed.

    Epochs follow each other without a gap, so that no row is skipped: a batch may hold rows of two epochs.
    """

    rows: Sequence[RowT]
    batch_size: int
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.rows) < self.batch_size:
            raise DataError(
                f"the data set has {len(self.rows)} rows, fewer than data.train_batch_size={self.batch_size}; "
                "give more rows or lower the batch size"
            )

    def batch(self, step: int) -> list[RowT]:
        """Return the rows of a step. The first step is 1."""
        return [self.rows[index] for index in self._indices(step)]

    def others(self, step: int, *, skip: int, count: int) -> list[RowT]:
        """Return rows that are not in the batch of a step, in a random order that depends on the step."""
        taken = set(self._indices(step))
        order: list[int] = (
            np.random.default_rng([self.seed, step, _OTHERS]).permutation(len(self.rows)).tolist()
        )
        return [self.rows[index] for index in order if index not in taken][skip : skip + count]

    def _indices(self, step: int) -> list[int]:
        start = (step - 1) * self.batch_size
        positions = [divmod(n, len(self.rows)) for n in range(start, start + self.batch_size)]
        orders = {epoch: self._order(epoch) for epoch in {epoch for epoch, _ in positions}}
        return [orders[epoch][position] for epoch, position in positions]

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.rows))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)).tolist()


def _load(source: str, *, prompt_key: str, workspace: Mapping[str, Any]) -> Iterator[RowFile]:
    def prepare(where: str, row: Any) -> dict[str, Any]:
        return _with_workspace(_with_prompt(row, where=where, prompt_key=prompt_key), workspace, where=where)

    located = environment_rows(source, workspace=workspace)
    if located is not None:
        rows = [_with_prompt(row, where=where, prompt_key=prompt_key) for where, row in located]
        yield RowFile(source, rows)
        return
    shards = find_shards(source)
    if shards is None:
        rows = [prepare(where, row) for where, row in number_rows(source, _call_row_function(source))]
        yield RowFile(source, rows)
        return
    for shard in shards:
        rows = [prepare(where, row) for where, row in shard.read(prompt_key=prompt_key)]
        yield RowFile(str(shard.path), rows)


def _call_row_function(source: str) -> Iterator[Any]:
    """Yield the rows that a user's function returns, as `file.py:function`. Convert its errors to DataError."""
    function = load_object(source, key="data")
    if not callable(function):
        raise ConfigError(
            f"data source {source!r} is a {type(function).__name__}; name a function that takes no arguments "
            "and returns rows"
        )
    try:
        rows = function()
        if inspect.iscoroutine(rows):
            rows.close()
            raise DataError(f"{source} is an async function; define it with def, not with async def")
        if not isinstance(rows, Iterable):
            raise DataError(f"{source} returned {describe_value(rows)}; it must return an iterable of rows")
        yield from _plain_rows(cast(Iterable[Any], rows))
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name} line {frame.lineno}"
        raise DataError(f"{source} raised {describe_error(error)} ({place}); fix the function") from error


def _plain_rows(rows: Iterable[Any]) -> Iterable[Any]:
    """Return rows without the nulls that Arrow adds, if they are a data set of Hugging Face."""
    if not hasattr(rows, "column_names"):
        return rows
    return (without_added_nulls(cast(dict[str, Any], row)) if isinstance(row, dict) else row for row in rows)


def _with_workspace(row: dict[str, Any], settings: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a row with the settings of the run merged over its column `workspace`."""
    if not settings:
        return row
    try:
        given = {} if row.get("workspace") is None else workspace_mapping(row["workspace"], where="workspace")
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error
    return {**row, "workspace": merge_mappings(given, settings)}


def _with_prompt(row: Any, *, where: str, prompt_key: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a {type(row).__name__}; a row is a mapping from column names to values")
    columns = {str(name): value for name, value in cast(Mapping[Any, Any], row).items()}
    key = "raw_prompt" if columns.get("raw_prompt") is not None else prompt_key
    if columns.get(key) is None:
        names = ", ".join(columns) or "none"
        near = get_close_matches(prompt_key, columns, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{where} has no {prompt_key!r} (columns: {names}); set data.prompt_key, or sft.messages_key for "
            f"conversations, to the column with the messages{hint}"
        )
    prepared = (
        columns
        | _nested_columns(columns)
        | {"raw_prompt": _messages(columns[key], where=f"{where}, column {key!r}")}
    )
    refuse_bad_columns(prepared, where=where)
    for name in RESERVED_COLUMNS & prepared.keys():
        raise DataError(f"{where} has a column {name!r}, which is an argument of every agent loop; rename it")
    return prepared


def refuse_bad_columns(row: Row, *, where: str) -> None:
    """Validate the form of the columns that agent loops read."""
    agent_name = row.get("agent_name")
    if not isinstance(agent_name, str | None):
        raise DataError(
            f"{where}: agent_name is {describe_value(agent_name)}; give the name of an agent loop"
        )
    timeout_s: Any = row.get(TIMEOUT_COLUMN)
    if timeout_s is not None and not (as_finite_number(timeout_s) or 0.0) > 0:
        raise DataError(
            f"{where}: {TIMEOUT_COLUMN} is {describe_value(timeout_s)}; give a number of seconds above 0"
        )
    for column, shape in (("tools_kwargs", _TOOLS_SHAPE), ("interaction_kwargs", _INTERACTION_SHAPE)):
        value: Any = row.get(column)
        if not isinstance(value, Mapping | None):
            raise DataError(f"{where}: {column} is {describe_value(value)}; give {shape}")
    tools_kwargs: Mapping[Any, Any] = row.get("tools_kwargs") or {}
    for tool, groups in tools_kwargs.items():
        of_tool: Mapping[Any, Any] = (
            cast(Mapping[Any, Any], groups) if isinstance(groups, Mapping) else {"": groups}
        )
        for name, value in of_tool.items():
            if not isinstance(value, Mapping | None):
                key = ".".join(filter(None, ("tools_kwargs", str(tool), str(name))))
                raise DataError(f"{where}: {key} is {describe_value(value)}; give {_TOOLS_SHAPE}")


def _nested_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that verl's data sets nest in `extra_info`, except those that the row has itself."""
    extra = columns.get("extra_info")
    if not isinstance(extra, Mapping):
        return {}
    nested = cast(Mapping[str, Any], extra)
    names = ("tools_kwargs", "tool_selection", "interaction_kwargs")
    return {name: nested[name] for name in names if nested.get(name) and columns.get(name) is None}


def _messages(prompt: Any, *, where: str) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    kind = type(prompt).__name__
    if not isinstance(prompt, Iterable) or isinstance(prompt, Mapping):
        raise DataError(f"{where} is a {kind}; {_PROMPT_SHAPE}")
    messages = list(cast(Iterable[Any], prompt))
    if not messages:
        raise DataError(f"{where} is an empty list; {_PROMPT_SHAPE}")
    return normalise_messages(messages, where=f"{where}: messages")


_TOOLS_SHAPE = 'a mapping like {"tool": {"create_kwargs": {...}}}'
_INTERACTION_SHAPE = 'a mapping like {"name": "...", ...}'
_PROMPT_SHAPE = 'give text, or messages like [{"role": "user", "content": "..."}]'
