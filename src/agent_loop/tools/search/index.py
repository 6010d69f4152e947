"""Full-text index on disk: SQLite's FTS5, ranked by BM25."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock

from agent_loop.errors import ConfigError, ToolError
from agent_loop.tools.search.corpus import Passage, corpus_files, read_passages

FORMAT = 1
"""Version of the file format. An index with another version is rebuilt."""
TOKENIZER = "porter unicode61"
MAX_QUERY_WORDS = 64
LONG_TEXT = 2000
"""Texts with more characters are excerpted in Python, since SQLite's time grows with the square of the length."""
TITLE_WEIGHT = 2.0
"""Weight of a word in a title, relative to the text."""
_WORD = re.compile(r"\w+")
logger = logging.getLogger(__name__)


class SearchIndex:
    """Full-text index of a corpus. It may be searched from any thread or process.

    The index is built once and stored in `cache_dir`. Its name depends on the files' paths, sizes and times, so a
    changed corpus gets a new index. If several processes need the same index, one builds it and the others wait.

    Raises:
        ConfigError: The corpus does not exist, or this Python's SQLite has no FTS5.
        DataError: A file of the corpus cannot be read.
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
        """Return the passages that contain any of the query's words, best first.

        Args:
            query: Any text; only its words are used.
            limit: Maximum number of passages.
            snippet_words: Length of the excerpt of a longer text; None returns the whole text.

        Raises:
            ToolError: The query has no words.
        """
        words = _WORD.findall(query)[:MAX_QUERY_WORDS]
        if not words:
            raise ToolError(f"the query {query!r} has no words to search for")
        text = "text"
        if snippet_words is not None:
            short = f"snippet(passages, 1, '', '', ' ... ', {snippet_words})"
            text = f"CASE WHEN length(text) > {LONG_TEXT} THEN text ELSE {short} END"
        expression = " OR ".join(f'"{word}"' for word in words)
        with closing(self._connect()) as connection:
            found = connection.execute(
                f"SELECT title, {text} FROM passages WHERE passages MATCH ? "
                f"ORDER BY bm25(passages, {TITLE_WEIGHT}, 1.0), rowid LIMIT ?",
                (expression, limit),
            ).fetchall()
        if snippet_words is None:
            return [Passage(*row) for row in found]
        return [Passage(title, excerpt(text, expression, num_words=snippet_words)) for title, text in found]

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
        try:
            with closing(sqlite3.connect(unfinished)) as connection:
                connection.execute("PRAGMA journal_mode = OFF")
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute(
                    f"CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = '{TOKENIZER}')"
                )
                connection.executemany("INSERT INTO passages VALUES (?, ?)", _passages(files))
                connection.execute("INSERT INTO passages (passages) VALUES ('optimize')")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                connection.commit()
            unfinished.replace(self.path)
        except sqlite3.OperationalError as error:
            raise ConfigError(f"the search index {self.path} cannot be built: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)


def excerpt(text: str, expression: str, *, num_words: int) -> str:
    """Return the part of a long text that matches a query best, in linear time. A shorter text is returned unchanged.

    The excerpt is the part with the most distinct words of the query. Ties are broken by how often these words occur,
    then by position.

    Args:
        text: The text to shorten.
        expression: The query, in the syntax of SQLite's FTS5.
        num_words: Length of the excerpt in words.
    """
    if len(text) <= LONG_TEXT:
        return text
    spans = [match.span() for match in _WORD.finditer(text)]
    if len(spans) <= num_words:
        return text
    words = [text[start:end].lower() for start, end in spans]
    hits = _matching({*words}, expression)
    counts: Counter[str] = Counter()
    best, first, num_hits = (-1, -1), 0, 0
    for place, word in enumerate(words):
        if word in hits:
            counts[word] += 1
        if place >= num_words and (left := words[place - num_words]) in hits:
            counts[left] -= 1
            if not counts[left]:
                del counts[left]
        num_hits += word in hits
        num_hits -= place >= num_words and words[place - num_words] in hits
        score = (len(counts), num_hits)
        if place >= num_words - 1 and score > best:
            best, first = score, place - num_words + 1
    last = first + num_words - 1
    before, after = " ... " if first else "", " ... " if last < len(words) - 1 else ""
    return f"{before}{text[spans[first][0] : spans[last][1]]}{after}"


def _matching(words: Collection[str], expression: str) -> set[str]:
    """Return the words that a query matches, by the same rules as in the index."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"CREATE VIRTUAL TABLE words USING fts5(word, tokenize = '{TOKENIZER}')")
        connection.executemany("INSERT INTO words VALUES (?)", ((word,) for word in words))
        found = connection.execute("SELECT word FROM words WHERE words MATCH ?", (expression,))
        return {word for (word,) in found}


def _passages(files: Sequence[Path]) -> Iterator[Passage]:
    for file in files:
        yield from read_passages(file)


def _fingerprint(files: Sequence[Path]) -> str:
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
