"""Trace writer for JSON lines, and the reader of its files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import orjson

from agent_loop.config import TraceConfig
from agent_loop.errors import DataError
from agent_loop.tracing.bounded import bounded
from agent_loop.tracing.documents import VERSION, Json, events_of

logger = logging.getLogger(__name__)

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class FileWriter:
    """Writer of one line per trajectory. A batch is appended completely or not at all."""

    max_batch = 64

    def __init__(self, config: TraceConfig) -> None:
        self._path = Path(config.path)
        self._file: BinaryIO | None = None

    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)

    def write(self, items: Iterable[Json], /) -> None:
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


def line_of(document: Json) -> bytes:
    """Return a document as a line of JSON. Lone surrogates become question marks, because UTF-8 cannot encode them."""
    try:
        return orjson.dumps(document, default=_plain, option=_OPTIONS)
    except orjson.JSONEncodeError:
        text = json.dumps(document, default=_plain, ensure_ascii=False)
        return text.encode("utf-8", "replace") + b"\n"


def read_traces(path: Path) -> Iterator[Json]:
    """Yield the documents of a file in the order in which their trajectories ended.

    An incomplete last line, such as after the process was killed, is skipped with a warning.

    Raises:
        DataError: There is no such file, or a line is not a trajectory.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    logger.warning("%s: line %d is incomplete; it is skipped", path, number)
                    return
                yield _parse_line(line, where=f"{path}, line {number}")
    except OSError as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({error}); give the file that rollout.trace.path named"
        ) from error


def event_lines(document: Json) -> Iterator[bytes]:
    """Yield a trajectory's events as lines of JSON."""
    trajectory_id = document["attributes"]["trajectory_id"]
    for event in events_of(document):
        yield orjson.dumps({"event": "", "trajectory_id": trajectory_id} | event, option=_OPTIONS)


def _parse_line(line: bytes, *, where: str) -> Json:
    try:
        document = orjson.loads(line)
        version = document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} is not a trajectory that rollout.trace.backend=file wrote ({type(error).__name__}: {error}); "
            "give another file, or copy this one again"
        ) from error
    if version != VERSION:
        raise DataError(
            f"{where} has version {version}, but this agent-loop reads {VERSION}; read it with the version of "
            "agent-loop that wrote it"
        )
    return document


def _plain(value: Any) -> Any:
    return cast(Any, value).tolist() if isinstance(value, np.ndarray) else bounded(value)
