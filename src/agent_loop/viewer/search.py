"""Full-text search in stored trajectories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from agent_loop.storage.arrow import compute, pa
from agent_loop.viewer.run_files import RunFile, RunFiles

JSON_COLUMNS = frozenset({"messages", "incidents", "feedback", "row", "reward_extra"})
TEXT_COLUMNS = frozenset({"answer", "failure", "failure_traceback", *JSON_COLUMNS})


def rows_with(text: str, *, file: RunFile, files: RunFiles) -> list[int]:
    """Return the rows of a file whose texts contain `text`, ignoring case."""
    table = files.columns(file, TEXT_COLUMNS)
    if table is None:
        return []
    found = np.zeros(table.num_rows, bool)
    for name in table.column_names:
        column = table[name]
        if not pa.types.is_string(column.type):
            continue
        if name in JSON_COLUMNS:
            found[
                [
                    row
                    for row in _candidates(column, text)
                    if not found[row] and _has_matching_value(column[row].as_py(), text)
                ]
            ] = True
        else:
            found[compute.indices_nonzero(_contains(column, text)).to_pylist()] = True
    return [int(row) for row in found.nonzero()[0]]


def _candidates(column: Any, text: str) -> list[int]:
    """Return the rows of a JSON column that contain `text` in one of its JSON spellings."""
    first, *others = _spellings(text)
    mask = _contains(column, first)
    for form in others:
        mask = compute.or_kleene(mask, _contains(column, form))
    return compute.indices_nonzero(mask).to_pylist()


def _spellings(text: str) -> set[str]:
    """Return the spellings of a text in JSON, and in JSON nested in a JSON string, such as the arguments of a call.

    Escaped letters differ in upper and lower case, so both are included.
    """
    forms = {text} if text.isascii() else {text, text.lower(), text.upper()}
    once = {escaped for form in forms for escaped in _escaped(form)}
    return once | {escaped for form in once for escaped in _escaped(form)}


def _escaped(text: str) -> tuple[str, str]:
    return json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


def _contains(column: Any, text: str) -> Any:
    return compute.match_substring(column, text, ignore_case=True)


def _has_matching_value(document: str, text: str) -> bool:
    """Return whether a value of a JSON document contains `text`. Keys are not searched."""
    wanted = text.casefold()
    return any(wanted in value.casefold() for value in _strings(document))


def _strings(document: str) -> Iterator[str]:
    """Yield all values of a JSON document as text, including the values of nested JSON strings."""
    try:
        stack: list[Any] = [json.loads(document)]
    except ValueError:
        yield document
        return
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += cast(dict[str, Any], value).values()
        elif isinstance(value, list):
            stack += cast(list[Any], value)
        elif isinstance(value, str) and value[:1] in ("{", "["):
            yield from _strings(value)
        elif value is not None:
            yield str(value)
