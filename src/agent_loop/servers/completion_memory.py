"""Memory of the completions that a token-level loop received, to find their tokens in the loop's output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from msgspec import Struct, structs

from agent_loop.trajectory.segments import Segment
from agent_loop.types import IntArray, TokenOutput, as_token_ids


class ReceivedCompletion(Struct, frozen=True, eq=False):
    """A completion that a loop received."""

    token_ids: IntArray
    """Shape [num_tokens]."""
    segments: tuple[Segment, ...]
    """Segments of the completion, one per weight version."""

    def num_common(self, ids: IntArray) -> int:
        """Return the length of the shorter of the completion and `ids` if it is a prefix of the other; else 0."""
        num_tokens = min(len(self.token_ids), len(ids))
        return num_tokens if np.array_equal(self.token_ids[:num_tokens], ids[:num_tokens]) else 0

    def first(self, num_tokens: int) -> list[Segment]:
        """Return the first tokens of the completion."""
        kept: list[Segment] = []
        for segment in self.segments:
            if num_tokens > 0:
                kept.append(segment.part(0, num_tokens))
            num_tokens -= len(segment)
        return kept


class CompletionMemory:
    """Memory of the completions that one loop received."""

    def __init__(self) -> None:
        self._completions: list[ReceivedCompletion] = []
        # By hash: keeping all contexts would need memory quadratic in the conversation's length.
        self._by_context: defaultdict[int, list[ReceivedCompletion]] = defaultdict(list)

    @property
    def last_version(self) -> int | None:
        """Weight version of the newest completion; None before the first."""
        return self._completions[-1].segments[-1].weight_version if self._completions else None

    def add(self, output: TokenOutput, *, context: IntArray) -> None:
        """Add a completion of a context. Empty completions are not kept."""
        if not output.token_ids:
            return
        completion = ReceivedCompletion(
            token_ids=as_token_ids(output.token_ids),
            segments=tuple([Segment.of_model(chunk) for chunk in output.chunks]),
        )
        self._completions.append(completion)
        self._by_context[hash(context.tobytes())].append(completion)

    def recognise(self, run: IntArray, *, context: IntArray) -> list[Segment] | None:
        """Return the sampled tokens at the start of `run`, in one segment per weight version.

        Completions that were sampled in `context` are preferred. Otherwise the longest match in any context is used;
        its segments have no log-probs, because a trainer would compute other values. Returns None without a match.
        """
        exact = self._by_context.get(hash(context.tobytes()), ())
        completion, num_tokens = _longest_match(exact, run)
        if completion is not None:
            return completion.first(num_tokens)
        completion, num_tokens = _longest_match(self._completions, run)
        if completion is None:
            return None
        return [structs.replace(s, logprobs=None, extras={}) for s in completion.first(num_tokens)]

    def next_start(self, run: IntArray) -> int:
        """Return the first position in `run` after 0 at which a whole completion starts, or the length of `run`."""
        run_bytes = run.tobytes()
        starts = [_find(completion.token_ids.tobytes(), run_bytes) for completion in self._completions]
        return min([start for start in starts if start is not None], default=len(run))


def _longest_match(
    completions: Iterable[ReceivedCompletion], run: IntArray
) -> tuple[ReceivedCompletion | None, int]:
    """Return the completion with the most tokens in common with `run`, and their number.

    Ties go to a completion that is in `run` as a whole. Returns None and 0 without a match.
    """
    best, most = None, (0, False)
    for completion in completions:
        num_common = completion.num_common(run)
        rank = (num_common, num_common == len(completion.token_ids))
        if num_common and rank > most:
            best, most = completion, rank
    return best, most[0]


def _find(ids: bytes, run: bytes) -> int | None:
    """Return the first position after 0 of the packed ids in a packed run, or None."""
    start = run.find(ids, 4)
    while start >= 0 and start % 4:
        start = run.find(ids, start + 1)
    return None if start < 0 else start // 4
