"""Weight versions for the tokens that vLLM streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from agent_loop.types import TokenChunk


class VersionSpan(NamedTuple):
    """Consecutive tokens of a completion that one weight version sampled, as vLLM reports them."""

    weight_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class UnstampedChunk:
    """Tokens as they come from the engine. Their weight version may be out of date."""

    chunk: TokenChunk
    spans: Sequence[VersionSpan] = ()
    """Versions of the whole completion. vLLM reports them with the last chunk."""


async def stamped(
    parts: AsyncGenerator[UnstampedChunk], *, current_version: Callable[[], int]
) -> AsyncGenerator[TokenChunk]:
    """Yield chunks as they come until the first weight update, and the later tokens at the end of the completion.

    vLLM reports which version sampled which token when the completion is over. Before the first update only one
    version is possible. A chunk that is read after the update may have been sampled before it.
    """
    first_version = current_version()
    num_yielded, held = 0, list[TokenChunk]()
    async with aclosing(parts):
        async for part in parts:
            is_last = part.chunk.stop_reason is not None
            if not is_last and not held and current_version() == first_version:
                num_yielded += len(part.chunk.token_ids)
                yield replace(part.chunk, weight_version=first_version)
                continue
            held.append(part.chunk)
            if is_last:
                rest = replace(TokenChunk.joined(held), weight_version=first_version)
                for chunk in stamp(UnstampedChunk(rest, part.spans), num_before=num_yielded):
                    yield chunk


def stamp(part: UnstampedChunk, *, num_before: int = 0) -> list[TokenChunk]:
    """Split a chunk at its weight versions.

    Args:
        num_before: Tokens of the completion before this chunk.

    Raises:
        ValueError: The reported versions do not cover the tokens.
    """
    left: list[VersionSpan] = []
    for span in part.spans:
        skipped = min(num_before, span.num_tokens)
        num_before -= skipped
        if span.num_tokens > skipped:
            left.append(VersionSpan(span.weight_version, span.num_tokens - skipped))
    chunk = part.chunk
    if len(left) < 2:
        known = left or part.spans
        return [replace(chunk, weight_version=known[-1].weight_version) if known else chunk]
    if sum(span.num_tokens for span in left) != len(chunk.token_ids):
        raise ValueError(f"weight versions {left} do not cover {len(chunk.token_ids)} tokens")
    chunks: list[TokenChunk] = []
    start = 0
    for span in left:
        end = start + span.num_tokens
        chunks.append(replace(chunk.part(start, end), weight_version=span.weight_version))
        start = end
    return chunks
