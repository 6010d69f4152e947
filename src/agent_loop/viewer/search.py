"""Which trajectories contain a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from agent_loop.storage.arrow import compute, pa
from agent_loop.viewer.run_files import RunFiles, SeenFile

JSON_COLUMNS = frozenset({"messages", "incidents", "feedback", "row", "reward_extra"})
TEXT_COLUMNS = frozenset({"answer", "failure", "failure_traceback", *JSON_COLUMNS})


def rows_with(text: str, *, file: SeenFile, files: RunFiles) -> list[int]:
    """The rows of a file whose words contain a text, in whatever case."""
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
                    if not found[row] and _says(column[row].as_py(), text)
                ]
            ] = True
        else:
            found[compute.indices_nonzero(_contains(column, text)).to_pylist()] = True
    return [int(row) for row in found.nonzero()[0]]


def _candidates(column: Any, text: str) -> list[int]:
    """The rows of a JSON column that contain it in one of the ways in which JSON may write it."""
    first, *others = _written(text)
    mask = _contains(column, first)
    for form in others:
        mask = compute.or_kleene(mask, _contains(column, form))
    return compute.indices_nonzero(mask).to_pylist()


def _written(text: str) -> set[str]:
    """As a value, and as one in JSON that is a value itself, as the arguments of a call are. Escaped letters differ
    in upper and lower case, which no search is to do."""
    forms = {text} if text.isascii() else {text, text.lower(), text.upper()}
    once = {form for said in forms for form in _escaped(said)}
    return once | {form for said in once for form in _escaped(said)}


def _escaped(text: str) -> tuple[str, str]:
    return json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


def _contains(column: Any, text: str) -> Any:
    return compute.match_substring(column, text, ignore_case=True)


def _says(document: str, text: str) -> bool:
    """Whether it is in one of the values: the keys of JSON do not count."""
    wanted = text.casefold()
    return any(wanted in said.casefold() for said in _strings(document))


def _strings(document: str) -> Iterator[str]:
    """The values, those in JSON within them included."""
    try:
        waiting: list[Any] = [json.loads(document)]
    except ValueError:
        yield document
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += cast(dict[str, Any], value).values()
        elif isinstance(value, list):
            waiting += cast(list[Any], value)
        elif isinstance(value, str) and value[:1] in ("{", "["):
            yield from _strings(value)
        elif value is not None:
            yield str(value)
