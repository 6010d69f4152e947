"""Trace writer for JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import orjson

from agent_loop.config import TraceConfig
from agent_loop.runtime.user_values import finite, plain_value
from agent_loop.tracing.bounded import bounded
from agent_loop.tracing.json_traces import JsonTrace


def make(config: TraceConfig) -> FileWriter:
    return FileWriter(Path(config.path))


class FileWriter:
    """Writer of one line per trajectory. A batch is appended completely or not at all."""

    max_batch = 64

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)

    def write(self, items: Iterable[JsonTrace], /) -> None:
        assert self._file is not None
        data = b"".join(map(line_of, items))
        begin = self._file.tell()
        try:
            num_written = self._file.write(data)
            if num_written != len(data):
                raise OSError(f"{self._path}: only {num_written} of {len(data)} bytes were written")
        except OSError:
            with suppress(OSError):
                self._file.truncate(begin)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def line_of(form: JsonTrace) -> bytes:
    """Return the JSON line of a document. Lone surrogates become question marks, because UTF-8 cannot encode them."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(form, default=_plain, option=options)
    except orjson.JSONEncodeError:
        try:
            text = json.dumps(finite(form), default=_plain, ensure_ascii=False)
        except BaseException:  # noqa: BLE001  (columns of rows may be objects, whose methods are user code)
            text = json.dumps(finite(plain_value(form)), default=_plain, ensure_ascii=False)
        return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    return cast(Any, value).tolist() if isinstance(value, np.ndarray) else bounded(value)
