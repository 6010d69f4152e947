"""Sampled tokens with their values per token. Imports nothing of this package, so that errors can carry chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

ServerStopReason: TypeAlias = Literal["stop", "length", "aborted"]


TokenArrays: TypeAlias = Mapping[str, NDArray[Any]]
"""Arrays by name. The first axis of each is the token."""


FORCED = "forced"
"""Name of the extra, uint8, that is 1 for tokens that a grammar forced. They are sampled tokens, and not trained on."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """Sampled tokens of one weight version: a part of a completion, as a server streams it.

    Each value per token has one entry for every token of `token_ids`. New kinds of values go into `extras`, which the
    package carries to the batch and to storage by concatenation and slicing alone.
    """

    token_ids: list[int]
    """The sampled tokens, the stop token included where one was sampled."""
    logprobs: list[float] | None
    """For each token `log_softmax(logits / temperature)`, natural log, before top-k and top-p cut anything away:
    what a trainer recomputes. Greedy completions give it at temperature 1. None if the server offers none. A grammar
    and penalties change the logits before: log-probs are then those of the distribution that was sampled from."""
    weight_version: int = 0
    """The version that sampled the tokens."""
    stop_reason: ServerStopReason | None = None
    """Why the completion ended. None on every chunk but the last."""
    num_preempted: int = 0
    """How often the server preempted the request since the previous chunk and recomputed its prefix."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the server found in its cache. None if unknown, and on every chunk but the last."""
    prefill_s: float | None = None
    """Seconds from the engine's receipt of the request to the first token. None if unknown, and on every chunk but the
    first. Not compared."""
    extras: TokenArrays = field(default_factory=dict[str, NDArray[Any]])
    """More values per token: arrays by name, shape [num_tokens, ...]."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenChunk):
            return NotImplemented
        return _compared_fields(self) == _compared_fields(other) and same_arrays(self.extras, other.extras)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (its lists can change)

    def part(self, start: int, end: int) -> TokenChunk:
        """Return the tokens from `start` to `end`. The stop reason stays with the last token."""
        if start == 0 and end >= len(self.token_ids):
            return self
        is_last = end >= len(self.token_ids)
        return TokenChunk(
            token_ids=self.token_ids[start:end],
            logprobs=None if self.logprobs is None else self.logprobs[start:end],
            weight_version=self.weight_version,
            stop_reason=self.stop_reason if is_last else None,
            num_preempted=self.num_preempted if is_last else 0,
            num_cached_tokens=self.num_cached_tokens if is_last else None,
            prefill_s=None if start else self.prefill_s,
            extras=sliced(self.extras, start, end),
        )

    def with_forced(self) -> TokenChunk:
        """Return a chunk that was sampled under a grammar, with the extra `FORCED`.

        A token was forced if its log-prob is exactly 0: the grammar allowed no other token, or none with a probability
        that float32 can tell from 0. Without log-probs, no token is known to be forced.
        """
        if self.logprobs is None:
            return self
        forced = (np.array(self.logprobs) == 0.0).astype(np.uint8)
        return replace(self, extras={**self.extras, FORCED: forced})

    def single_tokens(self) -> list[TokenChunk]:
        """Return one chunk per token."""
        if len(self.token_ids) < 2:
            return [self]
        return [self.part(position, position + 1) for position in range(len(self.token_ids))]

    @classmethod
    def joined(cls, chunks: Sequence[TokenChunk]) -> TokenChunk:
        """Return several consecutive chunks, at least one, as one chunk of the last chunk's weight version.

        A value per token is kept if every chunk with tokens has it.
        """
        if len(chunks) == 1:
            return chunks[0]
        with_tokens = [chunk for chunk in chunks if chunk.token_ids] or chunks
        logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        return cls(
            token_ids=list(chain.from_iterable([chunk.token_ids for chunk in chunks])),
            logprobs=list(chain.from_iterable(logprobs)) if len(logprobs) == len(chunks) else None,
            weight_version=with_tokens[-1].weight_version,
            stop_reason=chunks[-1].stop_reason,
            num_preempted=sum([chunk.num_preempted for chunk in chunks]),
            num_cached_tokens=chunks[-1].num_cached_tokens,
            prefill_s=chunks[0].prefill_s,
            extras=joined_arrays([chunk.extras for chunk in with_tokens]),
        )


_compared_fields = attrgetter(*[name for name in TokenChunk.__slots__ if name not in ("prefill_s", "extras")])


def sliced(arrays: TokenArrays, start: int, end: int) -> TokenArrays:
    """Return the arrays of the tokens from `start` to `end`."""
    return {name: array[start:end] for name, array in arrays.items()}


def joined_arrays(each: Sequence[TokenArrays]) -> TokenArrays:
    """Concatenate the arrays that all mappings have in the same shape per token. Drop all others."""
    first, *others = each
    if not others:
        return first
    return {
        name: np.concatenate([array, *[other[name] for other in others]])
        for name, array in first.items()
        if all(name in other and other[name].shape[1:] == array.shape[1:] for other in others)
    }


def stacked_arrays(each: Sequence[TokenArrays]) -> TokenArrays:
    """Return the arrays of tokens, of which each has the same names and shapes, with the token as their first axis."""
    return {name: np.stack([arrays[name] for arrays in each]) for name in each[0]} if each else {}


def same_arrays(one: TokenArrays, other: TokenArrays) -> bool:
    """Return whether both have equal arrays under equal names."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
