"""Stamps the parts of a stream with weight versions that are true."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from agent_loop.types import TokenChunk, TokenOutput, VersionSpan


@dataclass(frozen=True, slots=True)
class Part:
    """A part as it comes from the engine, not yet stamped."""

    chunk: TokenChunk
    spans: Sequence[VersionSpan] = ()
    """On the last part: which versions sampled the whole completion, as the engine itself says."""


async def stamped(
    parts: AsyncGenerator[Part], *, current_version: Callable[[], int]
) -> AsyncGenerator[TokenChunk]:
    """Yields parts as they come, and holds them back from the first weight update on.

    vLLM says which version sampled which token when a completion is over. Up to the first update it cannot be but one;
    a part that is read after it may have been sampled before.
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
                for chunk in TokenChunk.whole(_joined(held, part.spans, num_yielded, first_version)):
                    yield chunk


def stamp_whole(part: Part) -> list[TokenChunk]:
    """A completion that came in one part, as one chunk for each weight version."""
    return TokenChunk.whole(_joined([part.chunk], part.spans, 0, part.chunk.weight_version))


def _joined(
    held: Sequence[TokenChunk], spans: Sequence[VersionSpan], num_yielded: int, first_version: int
) -> TokenOutput:
    """What was held back, under the versions that the engine tells for it."""
    output = TokenOutput.from_chunks(held)
    left: list[VersionSpan] = []
    for span in spans:
        skipped = min(num_yielded, span.num_tokens)
        num_yielded -= skipped
        if span.num_tokens > skipped:
            left.append(VersionSpan(span.weight_version, span.num_tokens - skipped))
    known = left or list(spans) or [VersionSpan(first_version, 0)]
    return replace(
        output,
        weight_version=known[-1].weight_version,
        version_spans=tuple(left) if len(left) > 1 else (),
    )
