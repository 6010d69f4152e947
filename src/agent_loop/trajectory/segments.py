"""Runs of tokens with one origin, and values derived from several runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from agent_loop.errors import EpisodeError
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import (
    FORCED,
    FloatArray,
    IntArray,
    Origin,
    TokenArrays,
    TokenChunk,
    TokenIds,
    as_logprobs,
    as_token_ids,
    sliced,
)

MAX_TOKEN_ID = 2**31 - 1
UNKNOWN_VERSION = -1
"""Weight version of model tokens in an output that a loop built from token lists. The worker replaces it with the
version of the completions that the loop received."""


class Segment(Struct, frozen=True, eq=False):
    """Consecutive tokens with one origin. Those of a model segment also have one weight version."""

    token_ids: IntArray
    """Shape [num_tokens]."""
    origin: Origin
    logprobs: FloatArray | None = None
    """Shape [num_tokens]; model segments only. None if the server gave none."""
    weight_version: int | None = None
    """Model segments only. `UNKNOWN_VERSION` if the loop that built the segment did not know it."""
    attachments: tuple[Attachment, ...] = ()
    """Ordered by their tokens, which do not overlap. A model segment has none."""
    extras: TokenArrays = {}
    """More values per token from the server: arrays by name, shape [num_tokens, ...]. Model segments only."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise EpisodeError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")
        if (self.weight_version is not None) != (self.origin is Origin.MODEL):
            raise EpisodeError(
                f"{self.origin} segment with weight version {self.weight_version}: "
                "model segments, and only those, carry one"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of_model(cls, chunk: TokenChunk) -> Segment:
        """Return a copy of sampled tokens as a model segment."""
        return cls(
            as_token_ids(chunk.token_ids),
            Origin.MODEL,
            None if chunk.logprobs is None else as_logprobs(chunk.logprobs),
            chunk.weight_version,
            extras=chunk.extras,
        )

    def as_chunk(self) -> TokenChunk:
        """Return a model segment as a chunk without a stop reason."""
        return TokenChunk(
            self.token_ids.tolist(),
            None if self.logprobs is None else self.logprobs.tolist(),
            self.weight_version or 0,
            extras=self.extras,
        )

    def part(self, start: int, end: int) -> Segment:
        """Return the tokens from `start` to `end`, without attachments."""
        return structs.replace(
            self,
            token_ids=self.token_ids[start:end],
            logprobs=None if self.logprobs is None else self.logprobs[start:end],
            attachments=(),
            extras=sliced(self.extras, start, end),
        )


def count_turns(segments: Iterable[Segment]) -> int:
    """Return the number of prompts, assistant turns and replies. A completion that spans a weight swap is one turn."""
    return len(list(groupby([_SPEAKER[segment.origin] for segment in segments])))


def placed_attachments(segments: Iterable[Segment]) -> tuple[Attachment, ...]:
    """Return the attachments of all segments, with `start` counted from the first token of the first segment."""
    segments = tuple(segments)
    if not any(s.attachments for s in segments):
        return ()
    starts = accumulate(map(len, segments), initial=0)
    return tuple(a.moved(start) for start, s in zip(starts, segments, strict=False) for a in s.attachments)


def concatenated(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Return the concatenation of arrays, read-only. No arrays give an empty one of type `dtype`."""
    joined = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    joined.flags.writeable = False
    return joined


def without_forced(mask: NDArray[Any], segments: Sequence[Segment]) -> NDArray[Any]:
    """Return a mask of the segments' tokens with 0 for the tokens that a grammar forced."""
    if not any(FORCED in s.extras for s in segments):
        return mask
    forced = [s.extras[FORCED] if FORCED in s.extras else np.zeros(len(s), np.uint8) for s in segments]
    return concatenated([np.where(np.concatenate(forced), 0, mask).astype(mask.dtype)], mask.dtype)


def segments_of_mask(
    *,
    prompt_ids: TokenIds | None,
    response_ids: TokenIds | None,
    response_mask: TokenIds | None,
    response_logprobs: Sequence[float] | FloatArray | None,
    weight_version: int,
) -> list[Segment]:
    """Return the segments of token lists: one for each run of the mask."""
    if prompt_ids is None or response_ids is None or response_mask is None:
        raise EpisodeError("AgentLoopOutput needs segments, or prompt_ids, response_ids and response_mask")
    prompt, ids = _checked_ids(prompt_ids, name="prompt_ids"), _checked_ids(response_ids, name="response_ids")
    mask = np.asarray(response_mask)
    if mask.ndim != 1:
        raise EpisodeError(f"response_mask has shape {list(mask.shape)}; give a flat list of 0 and 1")
    if len(ids) != len(mask):
        raise EpisodeError(
            f"response_ids has {len(ids)} tokens but response_mask has {len(mask)}; they go together, one by one"
        )
    if not np.isin(mask, (0, 1)).all():
        raise EpisodeError("response_mask holds something else than 0 and 1")
    logprobs = None if response_logprobs is None else as_logprobs(response_logprobs)
    if logprobs is not None and len(logprobs) != len(ids):
        raise EpisodeError(f"response_ids has {len(ids)} tokens but response_logprobs has {len(logprobs)}")
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)] if len(ids) else [0]
    segments = [Segment(prompt, Origin.PROMPT)]
    for start, end in pairwise(cuts):
        if mask[start]:
            run_logprobs = None if logprobs is None else logprobs[start:end]
            segments.append(Segment(ids[start:end], Origin.MODEL, run_logprobs, weight_version))
        else:
            segments.append(Segment(ids[start:end], Origin.TOOL))
    return segments


_SPEAKER = {
    Origin.PROMPT: "prompt",
    Origin.MODEL: "model",
    Origin.PREFIX: "model",
    Origin.TOOL: "reply",
    Origin.INTERACTION: "reply",
}


def _checked_ids(token_ids: TokenIds, *, name: str) -> IntArray:
    """Return token ids as an array."""
    given: Any = token_ids
    try:
        ids = np.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeError(
            f"{name} does not hold token ids: {error}; give a flat list of integers"
        ) from error
    if ids.ndim == 1 and not len(ids):
        return as_token_ids([])
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise EpisodeError(
            f"{name} has shape {list(ids.shape)} and type {ids.dtype}; give a flat list of integers"
        )
    if ids.min() < 0 or ids.max() > MAX_TOKEN_ID:
        raise EpisodeError(
            f"{name} holds {int(ids.min())} to {int(ids.max())}; token ids are 0 to {MAX_TOKEN_ID}"
        )
    return as_token_ids(ids)
