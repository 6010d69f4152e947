"""Weight versions of streamed tokens, for engines that report at the end which version sampled which token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from typing import Any

from agent_loop.types import TokenChunk


async def stamped(
    replies: AsyncGenerator[tuple[TokenChunk, Sequence[int]]], *, current_version: Callable[[], int]
) -> AsyncGenerator[TokenChunk]:
    """Yield chunks as they come until the first weight update, and the later tokens at the end of the completion.

    Before the first update only one version is possible. A chunk that is read after the update may have been sampled
    before it.

    Args:
        replies: Chunks, and the version of each token of the whole completion. Only those of the last chunk are used.
        current_version: Returns the version of the engine's weights.
    """
    first_version = current_version()
    num_yielded, held = 0, list[TokenChunk]()
    async with aclosing(replies):
        async for chunk, versions in replies:
            is_last = chunk.stop_reason is not None
            if not is_last and not held and current_version() == first_version:
                num_yielded += len(chunk.token_ids)
                yield replace(chunk, weight_version=first_version)
                continue
            held.append(chunk)
            if is_last:
                rest = replace(TokenChunk.joined(held), weight_version=current_version())
                for part in stamp(rest, first=num_yielded, weight_versions=versions):
                    yield part


def stamp(chunk: TokenChunk, *, first: int, weight_versions: Sequence[int]) -> list[TokenChunk]:
    """Split a chunk at its weight versions.

    Args:
        first: Position of the chunk's first token in the completion.
        weight_versions: Version of each token of the completion. The last version holds for all later tokens. Empty
            leaves the chunk as it is.
    """
    if not weight_versions:
        return [chunk]
    last = len(weight_versions) - 1
    versions = [weight_versions[min(first + place, last)] for place in range(len(chunk.token_ids))]
    chunks: list[TokenChunk] = []
    start = 0
    for version, run in groupby(versions or weight_versions[-1:]):
        end = start + len(list(run))
        chunks.append(replace(chunk.part(start, end), weight_version=version))
        start = end
    return chunks


def as_version(label: Any) -> int:
    """Return an engine's label of a weight version as a number: 0 for the name that an engine starts with."""
    return int(label) if str(label).isdecimal() else 0


def token_versions(spans: Any) -> list[int]:
    """Return the version of each token, from spans of tokens as vLLM and SGLang report them."""
    return [
        as_version(span["version"])
        for span in spans or ()
        for _ in range(int(span["end"]) - int(span["start"]))
    ]
