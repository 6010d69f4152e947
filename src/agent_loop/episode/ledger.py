"""Token ledger: append-only record of a trajectory's tokens and of who wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from agent_loop.errors import EpisodeError
from agent_loop.token_chunks import FORCED
from agent_loop.trajectory import Segment
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, Origin, TokenIds, TokenOutput, as_token_ids

INITIAL_CAPACITY = 1024


class TokenLedger:
    """Append-only list of a trajectory's segments, and all their token ids in one growing int32 buffer.

    Appending costs amortised O(1) per token. Appended tokens never change, so views that `context` returned stay valid
    while the ledger grows.
    """

    def __init__(self) -> None:
        self._buffer: IntArray = np.empty(INITIAL_CAPACITY, np.int32)
        self._segments: list[Segment] = []
        self._num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_response_tokens = 0  # (stored, because limits read it many times per turn)
        self.attachments: tuple[Attachment, ...] = ()
        """Attachments of all segments. Their positions count from the first token of `context`."""

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def context(self) -> IntArray:
        """All tokens so far, shape [num_tokens]: a read-only view, not a copy."""
        view = self._buffer[: self._num_tokens]
        view.flags.writeable = False
        return view

    @property
    def last_token_id(self) -> int | None:
        return int(self._buffer[self._num_tokens - 1]) if self._num_tokens else None

    @property
    def last_sampled(self) -> int | None:
        """Index in the response of the last sampled token; None if no token was sampled.

        Tokens that a grammar forced are skipped, because a reward at a token that is not trained on has no effect. They
        are counted if the grammar forced the whole segment.
        """
        end = self.num_response_tokens
        for segment in reversed(self._segments):
            if segment.origin is Origin.MODEL:
                if FORCED not in segment.extras:
                    return end - 1
                chosen = np.flatnonzero(segment.extras[FORCED] == 0)
                return end - len(segment) + int(chosen[-1]) if len(chosen) else end - 1
            end -= len(segment)
        return None

    def append(self, token_ids: TokenIds, *, origin: Origin, attachments: Sequence[Attachment] = ()) -> None:
        """Append tokens that the model did not sample as one segment."""
        segment = Segment(_read_only_copy(token_ids), origin, attachments=tuple(attachments))
        if attachments:
            self.attachments += tuple(attachment.moved(self._num_tokens) for attachment in attachments)
        self._add(segment)

    def append_completion(self, completion: TokenOutput) -> None:
        """Append the tokens of a completion: one segment per weight version. An empty completion appends nothing."""
        for chunk in completion.chunks:
            self._add(Segment.of_model(chunk))

    def fork(self, num_tokens: int | None = None) -> TokenLedger:
        """Return a copy of the ledger, or of its first `num_tokens` tokens. Both share the `Segment` objects."""
        num_tokens = self._num_tokens if num_tokens is None else num_tokens
        ends = [0, *accumulate(map(len, self._segments))]
        if num_tokens not in ends:
            raise EpisodeError(f"a ledger can be forked after {ends} tokens, not after {num_tokens}")
        fork = TokenLedger()
        fork._buffer = self._buffer[:num_tokens].copy()
        fork._segments = self._segments[: ends.index(num_tokens)]
        fork.attachments = tuple(a for a in self.attachments if a.end <= num_tokens)
        fork._num_tokens = num_tokens
        fork.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
        fork.num_response_tokens = num_tokens - fork.num_prompt_tokens
        return fork

    def segments(self) -> tuple[Segment, ...]:
        """Return all segments, oldest first."""
        return tuple(self._segments)

    def _add(self, segment: Segment) -> None:
        token_ids = segment.token_ids
        needed = self._num_tokens + len(token_ids)
        if needed == self._num_tokens:
            return
        if needed > len(self._buffer):
            grown: IntArray = np.empty(max(needed, 2 * len(self._buffer)), np.int32)
            grown[: self._num_tokens] = self._buffer[: self._num_tokens]
            self._buffer = grown
        self._buffer[self._num_tokens : needed] = token_ids
        self._num_tokens = needed
        if segment.origin is Origin.PROMPT:
            self.num_prompt_tokens = needed
        else:
            self.num_response_tokens = needed - self.num_prompt_tokens
        self._segments.append(segment)


def _read_only_copy(token_ids: TokenIds) -> IntArray:
    ids = np.array(token_ids, np.int32) if isinstance(token_ids, np.ndarray) else as_token_ids(token_ids)
    ids.flags.writeable = False
    return ids
