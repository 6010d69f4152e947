"""Reader of the passages of a corpus: JSON lines, Parquet, plain text, or folders of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from agent_loop.errors import ConfigError, DataError
from agent_loop.files.plain_values import HALVES, parse_json, without_halves

TITLE_FIELDS = ("title", "name")
TEXT_FIELDS = ("text", "contents", "content", "body", "passage")
PASSAGE_WORDS = 120
"""Approximate number of words per passage of a plain text file, which is split at paragraphs."""

logger = logging.getLogger(__name__)


class Passage(NamedTuple):
    """Passage of a corpus: the unit that a search returns."""

    title: str
    text: str


def corpus_files(sources: Sequence[str]) -> list[Path]:
    """Return the files of a corpus. A folder contributes all files of a supported kind.

    Raises:
        ConfigError: A source does not exist or has an unsupported kind, or the corpus has no files.
    """
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.suffix in _READERS and file.is_file())
        elif path.suffix in _READERS and path.is_file():
            files.append(path)
        else:
            kinds = ", ".join(_READERS)
            raise ConfigError(
                f"corpus {source!r} is not a supported file or a folder; give a {kinds} file, or a folder of them"
            )
    if not files:
        raise ConfigError(f"there are no files in the corpus {list(sources)}; give at least one")
    return files


def read_passages(file: Path) -> Iterator[Passage]:
    """Yield the passages of one file, in order.

    Raises:
        DataError: The content does not match the file's suffix, or a row has no text.
    """
    return _READERS[file.suffix](file)


def as_passage(document: Any, *, where: str) -> Passage:
    """Convert a document of a corpus or of a retrieval service to a passage.

    Without a title field, the first line is the title, as in the corpora of Search-R1.

    Raises:
        DataError: The document has no text.
    """
    fields = cast(Mapping[str, Any], document) if isinstance(document, Mapping) else {"text": document}
    text = next((fields[name] for name in TEXT_FIELDS if isinstance(fields.get(name), str)), None)
    if text is None:
        raise DataError(f"{where} has none of the fields {', '.join(TEXT_FIELDS)}")
    title = next((fields[name] for name in TITLE_FIELDS if isinstance(fields.get(name), str)), None)
    if title is None:
        title, _, text = text.strip().partition("\n")
        title, text = title.strip().strip('"'), text or title
    return Passage(_encodable(title, where=where), _encodable(text.strip(), where=where))


def _encodable(text: str, *, where: str) -> str:
    """Replace unpaired surrogates, which JSON can represent but files and indexes cannot store."""
    if not HALVES.search(text):
        return text
    logger.warning("%s contains an unpaired surrogate; it is replaced by U+FFFD", where)
    return without_halves(text)


def _read_json_lines(file: Path) -> Iterator[Passage]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{file} line {number}"
                    try:
                        document = parse_json(line)
                    except ValueError as error:
                        raise DataError(f"{where} is not JSON: {error}") from error
                    yield as_passage(document, where=where)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {error}") from error


def _read_parquet(file: Path) -> Iterator[Passage]:
    arrow: Any = import_module("pyarrow")  # late, because the import is slow
    parquet: Any = import_module("pyarrow.parquet")
    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches():
            for document in batch.to_pylist():
                number += 1
                yield as_passage(document, where=f"{file} row {number}")
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def _read_text(file: Path) -> Iterator[Passage]:
    kept: list[str] = []
    try:
        paragraphs = file.read_text(encoding="utf-8-sig").split("\n\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {error}") from error
    for paragraph in filter(str.strip, paragraphs):
        if kept and sum(len(text.split()) for text in kept) + len(paragraph.split()) > PASSAGE_WORDS:
            yield Passage(file.stem, "\n\n".join(kept))
            kept = []
        kept.append(paragraph.strip("\n"))
    if kept:
        yield Passage(file.stem, "\n\n".join(kept))


_READERS: Mapping[str, Callable[[Path], Iterator[Passage]]] = {
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
    ".txt": _read_text,
    ".md": _read_text,
}
