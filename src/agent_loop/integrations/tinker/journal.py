"""Journal of a server: every request with its reply, so that a killed server continues where it was.

A request is written before the client hears that it was accepted, and its reply before the client gets it. The state of
a training client after some request is in a file of its own; the requests after it are repeated at a restart.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

SAMPLE = "sample"
"""Kind of the requests of sampling sessions."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL,
    body BLOB, reply BLOB, is_proto INTEGER
);
CREATE INDEX IF NOT EXISTS requests_of_owner ON requests (owner, number);
CREATE TABLE IF NOT EXISTS clients (id TEXT PRIMARY KEY, settings BLOB NOT NULL, state INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, weights TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Request:
    """Request whose reply the client fetches later."""

    id: str
    owner: str
    """Training client or sampling session, whose requests are executed in their order."""
    kind: str
    body: bytes
    number: int = 0
    """Number in the journal; 0 for a request that is not in it yet."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a request, as JSON or as a protobuf message."""

    body: bytes
    is_proto: bool = False


class Journal:
    """Journal of one server, in a SQLite file. Used from one thread."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(file, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        self._connection.close()

    def add(self, request: Request) -> Request | None:
        """Add a request and return it with its number, or None if the journal has it, because it was sent again."""
        cursor = self._connection.execute(
            "INSERT OR IGNORE INTO requests (id, owner, kind, body) VALUES (?, ?, ?, ?)",
            (request.id, request.owner, request.kind, request.body),
        )
        if not cursor.rowcount:
            return None
        return Request(request.id, request.owner, request.kind, request.body, int(cursor.lastrowid or 0))

    def set_reply(self, request: Request, reply: Reply) -> None:
        """Store the reply to a request. A sample is not repeated, so that its request is not needed any more."""
        self._connection.execute(
            "UPDATE requests SET reply = ?, is_proto = ?, body = iif(kind = ?, NULL, body) WHERE number = ?",
            (reply.body, reply.is_proto, SAMPLE, request.number),
        )

    def reply(self, request_id: str) -> Reply | None:
        """Return the reply to a request; None if there is none."""
        row = self._connection.execute(
            "SELECT reply, is_proto FROM requests WHERE id = ? AND reply IS NOT NULL", (request_id,)
        ).fetchone()
        return None if row is None else Reply(row[0], bool(row[1]))

    def unanswered(self) -> list[Request]:
        """Return all requests without a reply, oldest first."""
        return self._requests("reply IS NULL ORDER BY number")

    def answered(self, owner: str, *, after: int) -> list[Request]:
        """Return the requests of an owner after a number that have a reply, oldest first."""
        return self._requests("owner = ? AND number > ? AND reply IS NOT NULL ORDER BY number", owner, after)

    def add_client(self, client: str, settings: bytes) -> None:
        """Add a training client. The state of a new client is 0."""
        self._connection.execute("INSERT OR IGNORE INTO clients VALUES (?, ?, 0)", (client, settings))

    def client(self, client: str) -> tuple[bytes, int] | None:
        """Return the settings of a training client, and the number of the request that its saved state follows."""
        return self._connection.execute(
            "SELECT settings, state FROM clients WHERE id = ?", (client,)
        ).fetchone()

    def clients(self) -> list[str]:
        """Return the ids of all training clients."""
        return [row[0] for row in self._connection.execute("SELECT id FROM clients ORDER BY rowid")]

    def set_state(self, client: str, number: int) -> None:
        """Note that the state of a client after a request is saved. Earlier requests are not needed any more."""
        self._connection.execute("BEGIN")
        self._connection.execute("UPDATE clients SET state = ? WHERE id = ?", (number, client))
        self._connection.execute(
            "UPDATE requests SET body = NULL WHERE owner = ? AND number <= ?", (client, number)
        )
        self._connection.execute("COMMIT")

    def set_sampler(self, sampler: str, weights: str) -> None:
        """Add a sampling session with the path of its weights; empty for the base model."""
        self._connection.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?)", (sampler, weights))

    def sampler(self, sampler: str) -> str | None:
        """Return the path of the weights of a sampling session; None if it is not known."""
        row = self._connection.execute("SELECT weights FROM samplers WHERE id = ?", (sampler,)).fetchone()
        return None if row is None else row[0]

    def _requests(self, condition: str, *values: str | int) -> list[Request]:
        rows = self._connection.execute(
            f"SELECT id, owner, kind, body, number FROM requests WHERE {condition}", values
        )
        return [Request(row[0], row[1], row[2], row[3] or b"", row[4]) for row in rows]
