"""Read files of rows, one row after the other, each with its location."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from agent_loop.errors import DataError
from agent_loop.files.file_kinds import GZIP_MAGIC
from agent_loop.files.plain_values import parse_json
from agent_loop.rollout.columnar_rows import arrow_rows, parquet_rows
from agent_loop.rollout.located_rows import LocatedRow, number_rows
from agent_loop.rollout.row_sources import Shard

JSON_COLUMNS = frozenset({"tools_kwargs", "tool_selection", "interaction_kwargs", "extra_info"})
"""Columns of CSV files whose cells are read as JSON if they start like a mapping or a list."""
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")
_MAX_CELL = 2**31 - 1


def read_shard(shard: Shard, *, prompt_key: str) -> Iterator[LocatedRow]:
    """Yield the rows of a file.

    Args:
        shard: The file.
        prompt_key: The column with the prompt, which in CSV files may be JSON messages.

    Raises:
        DataError: The file cannot be read. The error names the line if the file has lines.
    """
    if shard.suffix == ".csv":
        return _read_csv(shard.path, prompts={prompt_key, "raw_prompt"})
    return _READERS[shard.suffix](shard.path)


def _read_jsonl(path: Path) -> Iterator[LocatedRow]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                yield where, parse_json(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON ({error}): {line.rstrip()[:80]!r}") from error


def _read_json(path: Path) -> Iterator[LocatedRow]:
    try:
        rows = parse_json("".join(_lines(path)))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a {type(rows).__name__}; a .json data file holds a list of rows")
    return number_rows(str(path), cast(list[Any], rows))


def _read_csv(path: Path, *, prompts: Collection[str]) -> Iterator[LocatedRow]:
    old_limit = csv.field_size_limit(_MAX_CELL)  # (of the process; long prompts exceed the default)
    reader = csv.reader(_lines(path), strict=True)
    filled: Iterator[list[str]] = filter(None, reader)
    start = 1
    try:
        header = [name.strip() for name in next(filled, list[str]())]
        _refuse_bad_header(header, path=path, prompts=prompts)
        start = reader.line_num + 1
        for cells in reader:
            where, start = f"{path} line {start}", reader.line_num + 1
            if not cells:  # a blank line
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{where} has {len(cells)} cells, but the header names {len(header)} columns; give each row one "
                    "cell per column, and quote cells with commas"
                )
            yield (
                where,
                {
                    name: _cell(cell, column=name, where=where, prompts=prompts)
                    for name, cell in zip(header, cells, strict=True)
                },
            )
    except csv.Error as error:
        raise DataError(
            f'{path} line {start} is not CSV ({error}); quote cells with ", and write a " inside them as ""'
        ) from error
    finally:
        csv.field_size_limit(old_limit)


def _refuse_bad_header(header: list[str], *, path: Path, prompts: Collection[str]) -> None:
    if not header:
        raise DataError(f"{path} is empty; its first line must name the columns")
    if "" in header:
        raise DataError(
            f"the header of {path} has no name for column {header.index('') + 1}; name it, or, if pandas wrote the "
            "file, write it with index=False"
        )
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise DataError(f"the header of {path} names the column {twice[0]!r} twice; rename one of them")
    if not {*prompts} & {*header}:
        wanted, given = " or ".join(map(repr, sorted(prompts))), ", ".join(name[:40] for name in header)
        raise DataError(
            f"the first line of {path} is its header, and names no column {wanted} (columns: {given}); add a header, "
            "separated by commas, or set data.prompt_key, or sft.messages_key for conversations, to the column with "
            "the messages"
        )


def _cell(text: str, *, column: str, where: str, prompts: Collection[str]) -> Any:
    """Return the value of a cell: parsed JSON for messages and mappings, None if empty, and text otherwise."""
    if not text:
        return None
    is_json = _LIKE_MESSAGES.match(text) if column in prompts else text.lstrip()[:1] in ("{", "[")
    if not is_json or column not in {*prompts, *JSON_COLUMNS}:
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{where}, column {column!r} is not JSON ({error}): {text[:80]!r}; write the cell with json.dumps"
        ) from error


_READERS: Mapping[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, compressed or not, with their line breaks."""
    number = 0
    try:
        with _opened(path) as file:
            for line in file:
                number += 1
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} line {number} cannot be read as UTF-8 text ({error}); save the file as UTF-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged after line {number} ({error}); compress or copy it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        start = file.read(len(GZIP_MAGIC))
    if path.suffix != ".gz":
        if start == GZIP_MAGIC:
            raise DataError(f"{path} is compressed with gzip; rename it to {path.name}.gz")
        return path.open("rb")
    if start and start != GZIP_MAGIC:
        raise DataError(f"{path} is not compressed with gzip; rename it to {path.stem}, or compress it")
    return cast(IO[bytes], gzip.open(path))
