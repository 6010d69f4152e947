"""The packed token record of one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from agent_loop.errors import EpisodeError
from agent_loop.trajectory import Segment
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, Origin, TokenIds, TokenOutput, as_token_ids

INITIAL_CAPACITY = 1024


class TokenLedger:
    """The segments of one trajectory, and all their token ids in one growing int32 buffer.

    Appending costs amortised O(1) per token. What was appended never changes, so the views that `context` hands out
    stay true while the ledger grows.
    """

    def __init__(self) -> None:
        self._buffer: IntArray = np.empty(INITIAL_CAPACITY, np.int32)
        self._segments: list[Segment] = []
        self._num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_response_tokens = 0  # (kept, since limits ask for it many times per turn)
        self.attachments: tuple[Attachment, ...] = ()
        """Everything attached so far, counted from the first token of `context`."""

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def context(self) -> IntArray:
        """Everything so far, shape [num_tokens]; a read-only view, not a copy."""
        view = self._buffer[: self._num_tokens]
        view.flags.writeable = False
        return view

    @property
    def last_token_id(self) -> int | None:
        return int(self._buffer[self._num_tokens - 1]) if self._num_tokens else None

    @property
    def last_sampled(self) -> int | None:
        """Where in the response the model's last token is; None if there is none."""
        end = self.num_response_tokens
        for segment in reversed(self._segments):
            if segment.origin is Origin.MODEL:
                return end - 1
            end -= len(segment)
        return None

    def append(self, token_ids: TokenIds, *, origin: Origin, attachments: Sequence[Attachment] = ()) -> None:
        """Adds tokens that no model sampled here.

        Args:
            token_ids: The tokens.
            origin: Who wrote them.
            attachments: What is attached to them, counted from the first of them.

        Raises:
            EpisodeError: A prompt after something else, tokens that claim to be the model's, or an attachment where
                there are no tokens for it.
        """
        if origin is Origin.MODEL:
            raise EpisodeError("model tokens come from a server's TokenOutput; use append_completion")
        if origin is Origin.PROMPT and self.num_response_tokens:
            raise EpisodeError("the prompt comes first; later tokens are tool or interaction tokens")
        segment = Segment(_kept(token_ids), origin, attachments=tuple(attachments))
        if attachments:
            self.attachments += tuple(attachment.moved(self._num_tokens) for attachment in attachments)
        self._add(segment)

    def append_completion(self, completion: TokenOutput) -> None:
        """Append the tokens of a completion: one segment per weight version. An empty completion appends nothing."""
        for chunk in completion.chunks:
            self._add(Segment.of_model(chunk))

    def fork(self, num_tokens: int | None = None) -> TokenLedger:
        """A ledger that goes on from here, or from where this one had so many tokens. Both hold the same `Segment`
        objects for what they have in common.

        Raises:
            EpisodeError: So many tokens end in the middle of what was appended at once.
        """
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
        """The record."""
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


def _kept(token_ids: TokenIds) -> IntArray:
    """A copy of the ids that nobody can change."""
    ids = np.array(token_ids, np.int32) if isinstance(token_ids, np.ndarray) else as_token_ids(token_ids)
    ids.flags.writeable = False
    return ids
