"""The packed token record of one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from agent_loop.attachments import Attachment
from agent_loop.errors import EpisodeError
from agent_loop.trajectory import Segment
from agent_loop.types import FloatArray, IntArray, Origin, TokenIds, TokenOutput, VersionSpan, as_token_ids

INITIAL_CAPACITY = 1024


class TokenLedger:
    """Token ids in one growing int32 buffer, and which run of them came from where.

    Appending costs amortised O(1) per token. What was appended never changes, so the views that `context` hands out
    stay true while the ledger grows.
    """

    def __init__(self) -> None:
        self._buffer: IntArray = np.empty(INITIAL_CAPACITY, np.int32)
        self._shared: tuple[Segment, ...] = ()
        self._runs: list[_Run] = []
        self._attachments: tuple[Attachment, ...] = ()
        self._num_tokens = 0
        self._num_prompt_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def num_response_tokens(self) -> int:
        return self._num_tokens - self._num_prompt_tokens

    @property
    def context(self) -> IntArray:
        """Everything so far, shape [num_tokens]; a read-only view, not a copy."""
        return self._view(0, self._num_tokens)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Everything attached so far, counted from the first token of `context`."""
        return self._attachments

    @property
    def last_token_id(self) -> int | None:
        return int(self._buffer[self._num_tokens - 1]) if self._num_tokens else None

    @property
    def last_sampled(self) -> int | None:
        """Where in the response the model's last token is; None if there is none."""
        end = self.num_response_tokens
        for part in chain(reversed(self._runs), reversed(self._shared)):
            if part.origin is Origin.MODEL:
                return end - 1
            end -= part.num_tokens if isinstance(part, _Run) else len(part)
        return None

    def append(self, token_ids: TokenIds, *, origin: Origin, attachments: Sequence[Attachment] = ()) -> None:
        """Adds tokens that no model sampled here.

        Args:
            token_ids: The tokens.
            origin: Who wrote them.
            attachments: What is attached to them, counted from the first of them.

        Raises:
            EpisodeError: A prompt after something else, or tokens that claim to be the model's.
        """
        if origin is Origin.MODEL:
            raise EpisodeError("model tokens come from a server's TokenOutput; use append_completion")
        if origin is Origin.PROMPT:
            if self.num_response_tokens:
                raise EpisodeError("the prompt comes first; later tokens are tool or interaction tokens")
            self._num_prompt_tokens += len(token_ids)
        self._attachments += tuple(attachment.moved(self._num_tokens) for attachment in attachments)
        self._extend(as_token_ids(token_ids), origin, None, None, tuple(attachments))

    def append_completion(self, completion: TokenOutput) -> None:
        """Adds what a server sampled: one run per weight version. An empty completion adds nothing."""
        ids = as_token_ids(completion.token_ids)
        log_probs = None if completion.log_probs is None else np.asarray(completion.log_probs, np.float32)
        spans = completion.version_spans or (VersionSpan(completion.weight_version, len(ids)),)
        start = 0
        for version, num_tokens in spans:
            end = start + num_tokens
            run_log_probs = None if log_probs is None else log_probs[start:end]
            self._extend(ids[start:end], Origin.MODEL, run_log_probs, version)
            start = end

    def fork(self, num_tokens: int | None = None) -> TokenLedger:
        """A ledger that goes on from here, or from where this one had so many tokens. Both hold the same `Segment`
        objects for what they have in common.

        Raises:
            EpisodeError: So many tokens end in the middle of what was appended at once.
        """
        num_tokens = self._num_tokens if num_tokens is None else num_tokens
        self._shared, self._runs = self.segments(), []
        ends = [0, *accumulate(map(len, self._shared))]
        if num_tokens not in ends:
            raise EpisodeError(f"a ledger can be forked after {ends} tokens, not after {num_tokens}")
        fork = TokenLedger()
        fork._buffer = self._buffer[:num_tokens].copy()
        fork._shared = self._shared[: ends.index(num_tokens)]
        fork._attachments = tuple(a for a in self._attachments if a.end <= num_tokens)
        fork._num_tokens = num_tokens
        fork._num_prompt_tokens = min(self._num_prompt_tokens, num_tokens)
        return fork

    def segments(self) -> tuple[Segment, ...]:
        """The record, on a buffer of exactly its size."""
        self._buffer = self._buffer[: self._num_tokens].copy()
        segments = list(self._shared)
        start = sum(map(len, segments))
        for run in self._runs:
            end = start + run.num_tokens
            segments.append(
                Segment(
                    self._view(start, end), run.origin, run.log_probs, run.weight_version, run.attachments
                )
            )
            start = end
        return tuple(segments)

    def _extend(
        self,
        ids: IntArray,
        origin: Origin,
        log_probs: FloatArray | None,
        weight_version: int | None,
        attachments: tuple[Attachment, ...] = (),
    ) -> None:
        if not len(ids):
            return
        needed = self._num_tokens + len(ids)
        if needed > len(self._buffer):
            grown: IntArray = np.empty(max(needed, 2 * len(self._buffer)), np.int32)
            grown[: self._num_tokens] = self._buffer[: self._num_tokens]
            self._buffer = grown
        self._buffer[self._num_tokens : needed] = ids
        self._num_tokens = needed
        self._runs.append(_Run(len(ids), origin, log_probs, weight_version, attachments))

    def _view(self, start: int, end: int) -> IntArray:
        view = self._buffer[start:end]
        view.flags.writeable = False
        return view


class _Run(NamedTuple):
    num_tokens: int
    origin: Origin
    log_probs: FloatArray | None
    weight_version: int | None
    attachments: tuple[Attachment, ...]
