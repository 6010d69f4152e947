"""Chat completions, whole or streamed, for a request that follows a shared completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_builder import ParsedChunk, ResponseBuilder
from agent_loop.completions.response_models import ChatCompletion, ChatCompletionChunk
from agent_loop.completions.sampling import UsageCounter
from agent_loop.errors import ServerError
from agent_loop.gateway.shared_completion import SharedCompletion


async def build_completion(request: ChatCompletionRequest, shared: SharedCompletion) -> ChatCompletion:
    """Wait for the whole completion and return it.

    Raises:
        AgentLoopError: The completion failed.
    """
    async with aclosing(shared.follow()) as followed:
        chunks = [chunk async for chunk in followed]
    builder = _builder(request, shared)
    return builder.completion([builder.choice(0, chunks)], usage=_usage(builder, chunks))


async def stream_chunks(
    request: ChatCompletionRequest, shared: SharedCompletion
) -> AsyncGenerator[ChatCompletionChunk]:
    """Yield the completion in chunks while it is sampled.

    Raises:
        AgentLoopError: The completion failed.
    """
    chunks: list[ParsedChunk] = []
    is_first = True
    async with aclosing(shared.follow()) as followed:
        async for chunk in followed:
            builder = _builder(request, shared)
            chunks.append(chunk)
            choice = builder.chunk_choice(chunk, is_first=is_first)
            if choice is not None:
                yield builder.chunk([choice], prompt_token_ids=builder.shown_prompt_ids if is_first else None)
                is_first = False
    builder = _builder(request, shared)
    if (last := builder.usage_chunk(_usage(builder, chunks))) is not None:
        yield last


def _usage(builder: ResponseBuilder, chunks: Sequence[ParsedChunk]) -> UsageCounter:
    usage = builder.usage_counter()
    for chunk in chunks:
        usage.add(chunk.decoded)
    return usage


def _builder(request: ChatCompletionRequest, shared: SharedCompletion) -> ResponseBuilder:
    """Return the builder for one of the requests that follow the completion."""
    if shared.builder is None:
        raise ServerError("the completion ended before sampling started; send the request again")
    return replace(shared.builder, request=request)
