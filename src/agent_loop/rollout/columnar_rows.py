"""Read Parquet and Arrow files of rows, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from agent_loop.chat.messages import without_added_nulls
from agent_loop.errors import DataError
from agent_loop.files.file_kinds import ARROW_MAGIC
from agent_loop.files.plain_values import parse_json
from agent_loop.rollout.located_rows import LocatedRow, number_rows

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_JSON_TYPE = "arrow.json"
"""The extension type of columns that `datasets.Json` writes: JSON as text."""


def parquet_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: The file is damaged.
    """
    return number_rows(str(path), _plain_rows(path, _parquet_batches(path), kind="Parquet"))


def arrow_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of an Arrow file: a stream, as `datasets` saves them, or the format with random access.

    Raises:
        DataError: The file is damaged.
    """
    return number_rows(str(path), _plain_rows(path, _arrow_batches(path), kind="Arrow"))


def _parquet_batches(path: Path) -> Iterator[Any]:
    parquet: Any = import_module("pyarrow.parquet")  # late: the import takes as long as that of this package
    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches()


def _arrow_batches(path: Path) -> Iterator[Any]:
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


def _plain_rows(path: Path, batches: Iterator[Any], *, kind: str) -> Iterator[dict[str, Any]]:
    arrow: Any = import_module("pyarrow")
    try:
        for batch in batches:
            decoders = _json_decoders(batch.schema)
            rows = map(without_added_nulls, batch.to_pylist())
            yield from (_with_decoded(row, decoders) for row in rows) if decoders else rows
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} cannot be read as {kind}: {error}; copy it again, or write it again"
        ) from error


def _json_decoders(fields: Any) -> dict[str, Callable[[Any], Any]]:
    """Return functions that decode the values of the fields that hold JSON, by name."""
    return {field.name: decode for field in fields if (decode := _json_decoder(field)) is not None}


def _json_decoder(field: Any) -> Callable[[Any], Any] | None:
    types: Any = import_module("pyarrow.types")
    metadata: Any = field.metadata or {}
    names = (metadata.get(b"ARROW:extension:name", b"").decode(), getattr(field.type, "extension_name", ""))
    if _JSON_TYPE in names:
        return _decoded
    if types.is_list(field.type) or types.is_large_list(field.type):
        decode_item = _json_decoder(field.type.value_field)
        return decode_item and (lambda items: items and [decode_item(item) for item in items])
    if types.is_struct(field.type):
        decoders = _json_decoders(field.type.field(place) for place in range(field.type.num_fields))
        return (lambda value: value and _with_decoded(value, decoders)) if decoders else None
    return None


def _decoded(text: str | None) -> Any:
    return None if text is None else parse_json(text)


def _with_decoded(value: Any, decoders: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {**value, **{name: decode(value[name]) for name, decode in decoders.items()}}
