"""Files of rows: find those of a source, and read them row by row, each row with its location for errors."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

from agent_loop.chat.messages import without_added_nulls
from agent_loop.errors import ConfigError, DataError, did_you_mean
from agent_loop.files.file_kinds import (
    ARROW_MAGIC,
    DATASET_DICT_FILE,
    SAVED_DATASET,
    STATE_FILE,
    explain,
    kind_of,
)
from agent_loop.files.plain_values import parse_json

LocatedRow = tuple[str, Any]
"""Location of a row, such as `rows.jsonl line 3`, and the row."""
JSON_COLUMNS = frozenset({"tools_kwargs", "tool_selection", "interaction_kwargs", "extra_info"})
"""Columns of CSV files whose cells are read as JSON if they start like a mapping or a list."""
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
COMPRESSIBLE = (".jsonl", ".json", ".csv")
"""Suffixes of files that may be compressed, as in `rows.jsonl.gz`."""
WANTED = ".jsonl, .json or .csv (also .gz), .parquet or .arrow"
_SPLIT_NAME = re.compile(r"(train|test|valid|validation|val|dev|eval)(?![a-zA-Z])")
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")
_MAX_CELL = 2**31 - 1
_MAX_NAMED = 5
"""Number of files that an error names."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_JSON_TYPE = "arrow.json"
"""The extension type of columns that `datasets.Json` writes: JSON as text."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of rows."""

    path: Path
    suffix: str
    """Kind of the file: one of `ROW_SUFFIXES`."""

    def read(self, *, prompt_key: str) -> Iterator[LocatedRow]:
        """Yield the rows of the file."""
        match self.suffix:
            case ".csv":
                return _read_csv(self.path, prompts={prompt_key, "raw_prompt"})
            case ".jsonl":
                return _read_jsonl(self.path)
            case ".json":
                return _read_json(self.path)
            case ".parquet":
                return number_rows(str(self.path), _read_arrow(self.path, kind="Parquet"))
            case _:
                return number_rows(str(self.path), _read_arrow(self.path, kind="Arrow"))


def number_rows(source: str, rows: Iterable[Any]) -> Iterator[LocatedRow]:
    """Yield rows with their locations: the source, and the number of the row, from 1."""
    for number, row in enumerate(rows, start=1):
        yield f"{source} row {number}", row


def find_shards(source: str) -> list[Shard] | None:
    """Return the files that a source names, sorted by name. Return None if the source is not a path.

    Args:
        source: A file, a folder of shards, a glob (`**` matches any number of folders), or a folder saved by
            `datasets`, followed by `:` and a split if the folder has several.
    """
    path = Path(source)
    folder, colon, split = source.rpartition(":")
    if path.is_dir():
        return _saved_shards(path) if kind_of(path) is SAVED_DATASET else _shards_in(path)
    if path.is_file():
        return [_shard(path)]
    if "://" in source:
        raise ConfigError(f"data source {source!r} is a URL; download it, and give its files or folder")
    if colon and Path(folder).exists() and not _has_functions(Path(folder)):
        if kind_of(Path(folder)) is not SAVED_DATASET:
            raise DataError(
                f"data source {source!r} names a split of {folder!r}, which is not a folder saved by `datasets`; give "
                "the files of the split, as in folder/train-*.parquet"
            )
        return _saved_shards(Path(folder), split=split)
    if has_magic(source):
        return _matching(source)
    if _suffix(path) is not None:
        raise DataError(
            f"data file {source!r} does not exist{_nearest(path)}; give the path of a file with rows"
        )
    if colon:
        return None
    raise ConfigError(
        f"data source {source!r} is neither a folder nor a file of a known kind{_nearest(path)}; give a file "
        f"({WANTED}), a folder or a glob of such files, a folder saved by `datasets`, suite:task, or file.py:function"
    )


def _has_functions(path: Path) -> bool:
    """Return whether a path is a Python file or package."""
    return path.suffix == ".py" or (path / "__init__.py").is_file()


def _shard(path: Path) -> Shard:
    suffix = _suffix(path)
    if suffix is None:
        raise ConfigError(
            f"the kind of data file {str(path)!r} is unknown; give {WANTED}, or file.py:function"
        )
    return Shard(path, suffix)


def _suffix(path: Path) -> str | None:
    """Return the kind of a file, such as `.jsonl` for `rows.jsonl.gz`. Return None if its name is not one of rows."""
    if path.suffix == ".gz":
        inner = Path(path.stem).suffix
        return inner if inner in COMPRESSIBLE else None
    return path.suffix if path.suffix in ROW_SUFFIXES else None


def _matching(pattern: str) -> list[Shard]:
    matches = sorted(map(Path, glob(pattern, recursive=True)))
    files = [path for path in matches if path.is_file()]
    if not files:
        found = f"matches only folders, such as {str(matches[0])!r}" if matches else "matches nothing"
        hint = "; add /*.parquet to match the files in them" if matches else "; correct the pattern"
        raise DataError(f"data source {pattern!r} {found}{_nearest(Path(pattern))}{hint}")
    return _of_one_kind(pattern, [_shard(path) for path in files])


def _shards_in(folder: Path) -> list[Shard]:
    if kind_of(folder) is not None:
        raise DataError(explain(folder, wanted="a folder of shards with rows"))
    files = [path for path in sorted(folder.iterdir()) if path.name[0] not in "._" and path.is_file()]
    shards = [Shard(path, suffix) for path in files if (suffix := _suffix(path)) is not None]
    if not shards:
        inner = next((path for path in sorted(folder.glob("*/*")) if path.is_file() and _suffix(path)), None)
        hint = f", as {str(folder / '**' / f'*{inner.suffix}')!r} does" if inner else ""
        raise DataError(
            f"folder {str(folder)!r} holds no file with rows ({WANTED}); name a folder or a glob that does{hint}"
        )
    return _of_one_kind(str(folder), shards)


def _of_one_kind(source: str, shards: Sequence[Shard]) -> list[Shard]:
    """Check that shards are of one kind and one split."""
    by_suffix = {shard.suffix: shard.path.name for shard in shards}
    if len(by_suffix) > 1:
        names = " and ".join(f"{suffix} ({name})" for suffix, name in sorted(by_suffix.items()))
        raise DataError(
            f"data source {source!r} holds files of several kinds: {names}; name one kind with a glob, as in "
            f"folder/*{next(iter(by_suffix))}"
        )
    splits = {found[1]: shard for shard in shards if (found := _SPLIT_NAME.match(shard.path.name))}
    if len(splits) > 1:
        some = next(iter(splits))
        raise DataError(
            f"data source {source!r} holds files of several splits: {', '.join(splits)}; name those of one, as in "
            f"folder/{some}*{splits[some].path.suffix}, or list the files one by one"
        )
    return list(shards)


def _saved_shards(folder: Path, *, split: str | None = None) -> list[Shard]:
    """Return the Arrow files of a folder that `datasets` saved."""
    listing = folder / DATASET_DICT_FILE
    if listing.is_file():
        splits: list[str] = _listing(listing)["splits"]
        if split is None and len(splits) != 1:
            raise DataError(
                f"{str(folder)!r} is a DatasetDict with the splits {', '.join(splits) or 'none'}; name one, as in "
                f"{folder}:{splits[0] if splits else 'train'}"
            )
        split = splits[0] if split is None else split
        if split not in splits:
            raise DataError(f"{str(folder)!r} has no split {split!r}{did_you_mean(split, splits)}")
        return _saved_shards(folder / split)
    if split is not None:
        raise DataError(
            f"{str(folder)!r} is one Dataset without splits; give the folder without {':' + split!r}"
        )
    state = _listing(folder / STATE_FILE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{str(folder)!r} was saved with an indices mapping, as old versions of `datasets` did; load it with "
            "`datasets`, and save it again"
        )
    return [Shard(folder / file["filename"], ".arrow") for file in state["_data_files"]]


def _listing(path: Path) -> dict[str, Any]:
    """Return the content of a file that `datasets` writes."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(
            f"{str(path)!r}, which `datasets` writes, is damaged ({error}); copy the folder again"
        ) from error


def _nearest(path: Path) -> str:
    """Describe the nearest existing folder above a missing path."""
    folder = next(
        parent for parent in (*path.parents, Path()) if not has_magic(str(parent)) and parent.is_dir()
    )
    names = sorted(inner.name for inner in folder.iterdir() if not inner.name.startswith("."))
    shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    return f" (the nearest folder that exists is {str(folder)!r}, with {shown or 'nothing in it'})"


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


def _read_csv(path: Path, *, prompts: set[str]) -> Iterator[LocatedRow]:
    old_limit = csv.field_size_limit(_MAX_CELL)  # (of the process; long prompts exceed the default)
    reader = csv.DictReader(_lines(path), strict=True)
    try:
        for cells in reader:
            where = f"{path} line {reader.line_num}"
            if None in cells or None in cells.values():
                raise DataError(
                    f"{where} does not have one cell per column; quote cells with commas, and name each column in the "
                    "first line"
                )
            named = ((name.strip(), cell) for name, cell in cells.items())
            yield (
                where,
                {name: _cell(cell, column=name, where=where, prompts=prompts) for name, cell in named},
            )
    except csv.Error as error:
        raise DataError(
            f'{path} is not CSV after line {reader.line_num} ({error}); quote cells with ", and write a " inside '
            'them as ""'
        ) from error
    finally:
        csv.field_size_limit(old_limit)


def _cell(text: str, *, column: str, where: str, prompts: set[str]) -> Any:
    """Return the value of a cell: parsed JSON for messages and mappings, None if empty, and text otherwise."""
    if not text:
        return None
    is_json = _LIKE_MESSAGES.match(text) if column in prompts else text.lstrip()[:1] in ("{", "[")
    if not is_json or column not in prompts | JSON_COLUMNS:
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{where}, column {column!r} is not JSON ({error}): {text[:80]!r}; write the cell with json.dumps"
        ) from error


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, compressed or not, with their line breaks."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
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


def _read_arrow(path: Path, *, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file, without the nulls that the format adds."""
    arrow: Any = import_module("pyarrow")  # late: the import takes as long as that of this package
    try:
        for batch in _parquet_batches(path) if kind == "Parquet" else _arrow_batches(path):
            rows = map(without_added_nulls, batch.to_pylist())
            if _JSON_TYPE in batch.schema.to_string():
                rows = map(partial(_decode_fields, fields=batch.schema), rows)
            yield from rows
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} cannot be read as {kind}: {error}; copy it again, or write it again"
        ) from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    parquet: Any = import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches()


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of a stream, as `datasets` saves them, or of the format with random access."""
    ipc: Any = import_module("pyarrow.ipc")
    # Memory-mapped, since reading a file with a damaged length would allocate more memory than there is.
    with import_module("pyarrow").memory_map(str(path)) as file:
        has_index = file.read(len(ARROW_MAGIC)) == ARROW_MAGIC
        file.seek(max(0, file.size() - len(_END_OF_STREAM)))
        if not has_index and file.read() != _END_OF_STREAM:
            raise ValueError("it has no end marker, so it was truncated")
        file.seek(0)
        opened = ipc.open_file(file) if has_index else ipc.open_stream(file)
        for batch in map(opened.get_batch, range(opened.num_record_batches)) if has_index else opened:
            batch.validate(full=True)  # Arrow files have no checksums, and wrong offsets would crash
            yield batch


def _decode_fields(row: dict[str, Any], fields: Any) -> dict[str, Any]:
    """Parse the JSON texts of a row or of a mapping in it, whose types are `fields`."""
    return {name: _decode(value, fields.field(name)) for name, value in row.items()}


def _decode(value: Any, field: Any) -> Any:
    types: Any = import_module("pyarrow.types")
    metadata: Any = field.metadata or {}
    names = (metadata.get(b"ARROW:extension:name", b"").decode(), getattr(field.type, "extension_name", ""))
    if value is None:
        return None
    if _JSON_TYPE in names:
        return parse_json(value)
    if types.is_list(field.type) or types.is_large_list(field.type):
        return [_decode(item, field.type.value_field) for item in value]
    return _decode_fields(value, field.type) if types.is_struct(field.type) else value
