"""Full-text search in stored trajectories."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.storage.schema import pa
from agent_loop.viewer.run_files import RunFile, RunFiles

JSON_COLUMNS = frozenset({"messages", "incidents", "feedback", "row", "reward_extra"})
TEXT_COLUMNS = frozenset({"answer", "failure", "failure_traceback", *JSON_COLUMNS})
MAX_BYTES = 512 * 2**20
"""Most bytes of texts that are kept in memory. The texts of other files are read again by each search."""
SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class _Texts:
    """All texts of a file in lower case, one after the other."""

    data: bytes
    starts: NDArray[np.int64]
    """Index in `data` of the first byte of each row."""

    def rows_with(self, wanted: bytes) -> list[int]:
        """Return the rows that contain these bytes."""
        found: list[int] = []
        place = self.data.find(wanted)
        while place >= 0:
            row = int(np.searchsorted(self.starts, place, side="right")) - 1
            found.append(row)
            if row + 1 == len(self.starts):
                break
            place = self.data.find(wanted, int(self.starts[row + 1]))
        return found


class TextSearch:
    """Full-text search in the files of a run, ignoring case. Texts of files that were searched stay in memory.

    Values of JSON columns are searched without their keys and without escapes.
    """

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Texts] = OrderedDict()
        self._num_bytes = 0

    def rows_with(self, text: str, *, file: RunFile) -> list[int]:
        """Return the rows of a file whose texts contain `text`."""
        wanted = text.lower().encode("utf-8", "replace")
        if not wanted or SEPARATOR in text:
            return []
        with self._lock:
            texts = self._kept.get(file.number)
            if texts is not None:
                self._kept.move_to_end(file.number)
        if texts is None:
            texts = _texts_of(self._files.columns(file, TEXT_COLUMNS))
            self._keep(file.number, texts)
        return texts.rows_with(wanted)

    def _keep(self, number: int, texts: _Texts) -> None:
        """Keep the texts of a file, and drop those of files that were not searched for the longest time."""
        with self._lock:
            if number not in self._kept:
                self._num_bytes += len(texts.data)
            self._kept[number] = texts
            while self._num_bytes > MAX_BYTES:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= len(dropped.data)


def _texts_of(table: Any) -> _Texts:
    if table is None:
        return _Texts(b"", np.zeros(0, np.int64))
    names = [name for name in table.column_names if pa.types.is_string(table[name].type)]
    columns = [_values(table[name], is_json=name in JSON_COLUMNS) for name in names]
    parts = [
        (SEPARATOR.join(values) + SEPARATOR).lower().encode("utf-8", "replace")
        for values in zip(*columns, strict=True)
    ]
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return _Texts(b"".join(parts), np.cumsum(lengths) - lengths)


def _values(column: Any, *, is_json: bool) -> list[str]:
    """Return the text of each row of a column. The values of a JSON document are joined by `SEPARATOR`."""
    texts = [text or "" for text in column.to_pylist()]
    if not is_json:
        return texts
    joined = {document: SEPARATOR.join(_strings(document)) for document in set(texts)}
    return [joined[document] for document in texts]


def _strings(document: str) -> list[str]:
    """Return all values of a JSON document as text, including the values of nested JSON strings."""
    if document in ("", "[]", "{}"):
        return []
    try:
        stack: list[Any] = [json.loads(document)]
    except ValueError:
        return [document]
    found: list[str] = []
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found += _strings(value) if value[:1] in ("{", "[") else (value,)
        elif isinstance(value, dict):
            stack += cast(dict[str, Any], value).values()
        elif isinstance(value, list):
            stack += cast(list[Any], value)
        elif value is not None:
            found.append(str(value))
    return found
