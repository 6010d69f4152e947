"""Call a user's function that returns rows."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from agent_loop.chat.messages import without_added_nulls
from agent_loop.errors import ConfigError, DataError
from agent_loop.loading import load_object
from agent_loop.runtime.describe import describe_error, describe_value


def call_row_function(source: str) -> Iterator[Any]:
    """Return the rows of `file.py:function`.

    Raises:
        ConfigError: There is no such function.
        DataError: The function raises, when it is called or while its result is iterated, or does not return rows.
    """
    function = load_object(source, key="data")
    if not callable(function):
        raise ConfigError(
            f"data source {source!r} is a {type(function).__name__}; name a function that takes no arguments "
            "and returns rows"
        )
    return _rows_of(function, source=source)


def plain_rows(rows: Iterable[Any]) -> Iterable[Any]:
    """Return rows without the nulls that Arrow adds, if they are a data set of Hugging Face."""
    if not hasattr(rows, "column_names"):
        return rows
    return (without_added_nulls(cast(dict[str, Any], row)) if isinstance(row, dict) else row for row in rows)


def _rows_of(function: Callable[[], Any], *, source: str) -> Iterator[Any]:
    """Yield the rows that a user's function returns. Convert its errors to DataError."""
    try:
        rows = function()
        if inspect.iscoroutine(rows):
            rows.close()
            raise DataError(f"{source} is an async function; define it with def, not with async def")
        if not isinstance(rows, Iterable):
            raise DataError(f"{source} returned {describe_value(rows)}; it must return an iterable of rows")
        yield from plain_rows(cast(Iterable[Any], rows))
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{source} raised {describe_error(error)}{_location_of(error)}; fix the function"
        ) from error


def _location_of(error: BaseException) -> str:
    """Return where an error was raised, as in ` (data.py line 7)`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
