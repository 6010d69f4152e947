"""Contexts of the sessions at a server, so that a turn sends only its new tokens. Pure: no I/O.

The client and the server both keep the tokens of a session and their checksum. If the checksums differ, the client
sends the whole context again.
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


class ContextDelta(NamedTuple):
    """New tokens and attachments of a context, relative to the context before."""

    num_held: int
    """Tokens that the server has. 0 replaces the server's context."""
    checksum: int
    """CRC-32 of the tokens that the server has."""
    new_tokens: bytes
    """Token ids as int32."""
    num_attachments_held: int = 0
    new_attachments: tuple[Attachment, ...] = ()


class UnknownContext(Exception):
    """The server does not have the context that a delta extends."""


class SentContexts:
    """Contexts that a client has sent.

    Token arrays are kept by reference, because they do not change.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _SentContext] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def delta(
        self, session: str, prompt_ids: IntArray, attachments: Sequence[Attachment] = ()
    ) -> ContextDelta:
        """Return what the server needs for this context."""
        sent = self._sent.get(session)
        if sent is None or not sent.is_prefix_of(prompt_ids, attachments):
            return ContextDelta(0, 0, prompt_ids.tobytes(), 0, tuple(attachments))
        return ContextDelta(
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
        delta: ContextDelta,
        prompt_ids: IntArray,
        attachments: Sequence[Attachment],
        completion: bytes,
    ) -> None:
        """Record that the server has this context and its completion."""
        checksum = zlib.crc32(completion, zlib.crc32(delta.new_tokens, delta.checksum))
        digests = tuple(attachment.digest for attachment in attachments)
        self._sent[session] = _SentContext(prompt_ids, np.frombuffer(completion, np.int32), checksum, digests)

    def forget(self, session: str) -> None:
        self._sent.pop(session, None)


@dataclass(frozen=True, slots=True, eq=False)
class _SentContext:
    prompt_ids: IntArray
    completion_ids: IntArray
    checksum: int
    digests: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def is_prefix_of(self, prompt_ids: IntArray, attachments: Sequence[Attachment]) -> bool:
        """Return whether a context starts with this context."""
        middle, end = len(self.prompt_ids), len(self)
        return (
            len(prompt_ids) >= end
            and self.digests == tuple(a.digest for a in attachments[: len(self.digests)])
            and np.array_equal(prompt_ids[:middle], self.prompt_ids)
            and np.array_equal(prompt_ids[middle:end], self.completion_ids)
        )


class ReceivedContexts:
    """Contexts that a server has received."""

    def __init__(self) -> None:
        self._contexts: dict[str, _ReceivedContext] = {}
        self._sessions_of: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def extend(
        self, session: str, delta: ContextDelta, *, client: str
    ) -> tuple[IntArray, tuple[Attachment, ...]]:
        """Extend a session's context, and return all its tokens and attachments.

        Raises:
            UnknownContext: The delta extends another context than the session has.
        """
        context = self._contexts.get(session)
        if not delta.num_held:
            self.end(session)
            context = self._contexts[session] = _ReceivedContext(client)
            self._sessions_of.setdefault(client, set()).add(session)
        elif context is None or (len(context), context.checksum) != (delta.num_held, delta.checksum):
            raise UnknownContext
        context.append(delta.new_tokens)
        context.attachments = context.attachments[: delta.num_attachments_held] + delta.new_attachments
        return context.token_ids, context.attachments

    def append(self, session: str, completion: bytes) -> None:
        """Append a completion to a session's context."""
        context = self._contexts.get(session)
        if context is not None:
            context.append(completion)

    def end(self, session: str) -> None:
        context = self._contexts.pop(session, None)
        if context is not None:
            self._sessions_of[context.client].discard(session)

    def sessions_of(self, client: str) -> tuple[str, ...]:
        return tuple(self._sessions_of.get(client, ()))

    def drop_client(self, client: str) -> None:
        for session in self.sessions_of(client):
            self.end(session)
        self._sessions_of.pop(client, None)


class _ReceivedContext:
    """Tokens in a growing buffer. Views that were returned never change."""

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
