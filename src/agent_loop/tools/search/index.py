"""Full-text index of a corpus on disk: SQLite's FTS5, ranked by BM25."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from filelock import FileLock

from agent_loop.errors import ConfigError, DataError, ToolError
from agent_loop.files.plain_values import parse_json, without_halves

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
    """Return the files of a corpus. A folder contributes all files of a supported kind."""
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
    """Yield the passages of one file, in order."""
    return _READERS[file.suffix](file)


def as_passage(document: Any, *, where: str) -> Passage:
    """Convert a document of a corpus or of a retrieval service to a passage.

    Without a title field, the first line is the title, as in the corpora of Search-R1.
    """
    fields = cast(Mapping[str, Any], document) if isinstance(document, Mapping) else {"text": document}
    text = next((fields[name] for name in TEXT_FIELDS if isinstance(fields.get(name), str)), None)
    if text is None:
        raise DataError(f"{where} has none of the fields {', '.join(TEXT_FIELDS)}")
    title = next((fields[name] for name in TITLE_FIELDS if isinstance(fields.get(name), str)), None)
    if title is None:
        title, _, text = text.strip().partition("\n")
        title, text = title.strip().strip('"'), text or title
    return Passage(without_halves(title), without_halves(text.strip()))


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


FORMAT = 1
"""Version of the file format. An index with another version is rebuilt."""
TOKENIZER = "porter unicode61"
MAX_QUERY_WORDS = 64
TITLE_WEIGHT = 2.0
"""Weight of a word in a title, relative to the text."""
_WORD = re.compile(r"\w+")


class SearchIndex:
    """Full-text index of a corpus. It may be searched from any thread or process.

    The index is built once and stored in `cache_dir`. Its name depends on the files' paths, sizes and times, so a
    changed corpus gets a new index. If several processes need the same index, one builds it and the others wait.
    """

    def __init__(self, sources: Sequence[str], *, cache_dir: Path) -> None:
        files = corpus_files(sources)
        self.path = cache_dir / f"{files[0].stem}-{_fingerprint(files)}.sqlite"
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):
            if not self._is_built():
                self._build(files)

    def __len__(self) -> int:
        with closing(self._connect()) as connection:
            return int(connection.execute("SELECT count(*) FROM passages").fetchone()[0])

    def search(self, query: str, *, limit: int, snippet_words: int | None) -> list[Passage]:
        """Return the passages that contain any of the query's words, best first."""
        words = _WORD.findall(query)[:MAX_QUERY_WORDS]
        if not words:
            raise ToolError(f"the query {query!r} has no words to search for")
        snippet = f"snippet(passages, 1, '', '', ' ... ', {snippet_words})"
        text = "text" if snippet_words is None else snippet
        expression = " OR ".join(f'"{word}"' for word in words)
        with closing(self._connect()) as connection:
            found = connection.execute(
                f"SELECT title, {text} FROM passages WHERE passages MATCH ? "
                f"ORDER BY bm25(passages, {TITLE_WEIGHT}, 1.0), rowid LIMIT ?",
                (expression, limit),
            ).fetchall()
        return [Passage(*row) for row in found]

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(str(self.path.resolve()))}?mode=ro&immutable=1", uri=True)

    def _is_built(self) -> bool:
        with suppress(sqlite3.Error), closing(self._connect()) as connection:
            return connection.execute("PRAGMA user_version").fetchone()[0] == FORMAT
        return False

    def _build(self, files: Sequence[Path]) -> None:
        """Build the index in a temporary file, and rename it to its final path when it is complete."""
        unfinished = self.path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.unlink(missing_ok=True)
        logger.info("building the search index %s", self.path)
        passages = (passage for file in files for passage in read_passages(file))
        try:
            with closing(sqlite3.connect(unfinished)) as connection:
                connection.execute("PRAGMA journal_mode = OFF")
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute(
                    f"CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = '{TOKENIZER}')"
                )
                connection.executemany("INSERT INTO passages VALUES (?, ?)", passages)
                connection.execute("INSERT INTO passages (passages) VALUES ('optimize')")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                connection.commit()
            unfinished.replace(self.path)
        except sqlite3.OperationalError as error:
            raise ConfigError(f"the search index {self.path} cannot be built: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)


def _fingerprint(files: Sequence[Path]) -> str:
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
