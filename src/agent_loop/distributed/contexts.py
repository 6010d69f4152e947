"""What a server has seen of each session, so that a turn carries only what is new. Pure: no I/O.

Both sides keep the tokens of a session and their checksum. A server that does not hold what the client thinks it does
says so, and gets everything again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, as_token_ids

INITIAL_CAPACITY = 1024


class Delta(NamedTuple):
    """What a context adds to the one before."""

    num_held: int
    """Tokens that the server has. 0 begins anew."""
    checksum: int
    """Of those."""
    new_tokens: bytes
    """int32."""
    num_attachments_held: int = 0
    new_attachments: tuple[Attachment, ...] = ()


class UnknownContext(Exception):
    """The server does not hold what a delta adds to."""


class SentContexts:
    """The client's side.

    What was sent is kept by reference: token arrays do not change.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def delta(self, session: str, prompt_ids: IntArray, attachments: Sequence[Attachment] = ()) -> Delta:
        """What a server must be told for this context."""
        sent = self._sent.get(session)
        if sent is None or not sent.begins(prompt_ids, attachments):
            return Delta(0, 0, prompt_ids.tobytes(), 0, tuple(attachments))
        return Delta(
            num_held=len(sent),
            checksum=sent.checksum,
            new_tokens=prompt_ids[len(sent) :].tobytes(),
            num_attachments_held=len(sent.digests),
            new_attachments=tuple(attachments[len(sent.digests) :]),
        )

    def keep(
        self,
        session: str,
        *,
        delta: Delta,
        prompt_ids: IntArray,
        attachments: Sequence[Attachment],
        completion: bytes,
    ) -> None:
        """Takes note that a server has this context and what it answered."""
        checksum = zlib.crc32(completion, zlib.crc32(delta.new_tokens, delta.checksum))
        digests = tuple(attachment.digest for attachment in attachments)
        self._sent[session] = _Sent(prompt_ids, np.frombuffer(completion, np.int32), checksum, digests)

    def forget(self, session: str) -> None:
        self._sent.pop(session, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    prompt_ids: IntArray
    completion_ids: IntArray
    checksum: int
    digests: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def begins(self, prompt_ids: IntArray, attachments: Sequence[Attachment]) -> bool:
        """Whether a context goes on from this one."""
        middle, end = len(self.prompt_ids), len(self)
        return (
            len(prompt_ids) >= end
            and self.digests == tuple(a.digest for a in attachments[: len(self.digests)])
            and np.array_equal(prompt_ids[:middle], self.prompt_ids)
            and np.array_equal(prompt_ids[middle:end], self.completion_ids)
        )


class HeldContexts:
    """The server's side."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._sessions_of: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def extend(self, session: str, delta: Delta, *, client: str) -> tuple[IntArray, tuple[Attachment, ...]]:
        """The whole context, and everything attached to it.

        Raises:
            UnknownContext: The delta is to another context than the one that is here.
        """
        held = self._held.get(session)
        if not delta.num_held:
            self.end(session)
            held = self._held[session] = _Held(client)
            self._sessions_of.setdefault(client, set()).add(session)
        elif held is None or (len(held), held.checksum) != (delta.num_held, delta.checksum):
            raise UnknownContext
        held.append(delta.new_tokens)
        held.attachments = held.attachments[: delta.num_attachments_held] + delta.new_attachments
        return held.token_ids, held.attachments

    def append(self, session: str, completion: bytes) -> None:
        """Adds what was answered."""
        held = self._held.get(session)
        if held is not None:
            held.append(completion)

    def end(self, session: str) -> None:
        held = self._held.pop(session, None)
        if held is not None:
            self._sessions_of[held.client].discard(session)

    def sessions_of(self, client: str) -> tuple[str, ...]:
        return tuple(self._sessions_of.get(client, ()))

    def drop_client(self, client: str) -> None:
        for session in self.sessions_of(client):
            self.end(session)
        self._sessions_of.pop(client, None)


class _Held:
    """Tokens in a growing buffer; what was handed out never changes."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.checksum = 0
        self.attachments: tuple[Attachment, ...] = ()
        self._buffer: IntArray = np.empty(INITIAL_CAPACITY, np.int32)
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def token_ids(self) -> IntArray:
        view = self._buffer[: self._num_tokens]
        view.flags.writeable = False
        return view

    def append(self, new_tokens: bytes) -> None:
        end = self._num_tokens + len(new_tokens) // 4
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[: self._num_tokens] = self._buffer[: self._num_tokens]
            self._buffer = grown
        self._buffer[self._num_tokens : end] = np.frombuffer(new_tokens, np.int32)
        self._num_tokens = end
        self.checksum = zlib.crc32(new_tokens, self.checksum)


def token_bytes(token_ids: Sequence[int] | IntArray) -> bytes:
    return as_token_ids(token_ids).tobytes()
