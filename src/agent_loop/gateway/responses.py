"""Chat completions, whole or streamed, for a request that follows shared completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_builder import ParsedChunk, ResponseBuilder
from agent_loop.completions.response_models import ChatCompletion, ChatCompletionChunk
from agent_loop.completions.sampling import UsageCounter
from agent_loop.errors import ServerError
from agent_loop.gateway.shared_completion import SharedChoices, SharedCompletion
from agent_loop.runtime.concurrency import merged, run_together


async def build_completion(request: ChatCompletionRequest, shared: SharedChoices) -> ChatCompletion:
    """Wait for the whole completions and return them.

    Raises:
        AgentLoopError: A completion failed.
    """
    followed = await run_together(_whole(choice) for choice in shared.choices)
    builders = [_builder(request, choice) for choice in shared.choices]
    first = builders[0]
    choices = [
        builder.choice(index, chunks)
        for index, (builder, chunks) in enumerate(zip(builders, followed, strict=True))
    ]
    return first.completion(choices, usage=_usage(first, [chunk for chunks in followed for chunk in chunks]))


async def stream_chunks(
    request: ChatCompletionRequest, shared: SharedChoices
) -> AsyncGenerator[ChatCompletionChunk]:
    """Yield the completions in chunks while they are sampled.

    Raises:
        AgentLoopError: A completion failed.
    """
    chunks: list[ParsedChunk] = []
    started: set[int] = set()
    envelope: ResponseBuilder | None = None
    async with aclosing(merged(choice.follow() for choice in shared.choices)) as followed:
        async for chunk in followed:
            builder = _builder(request, shared.choices[chunk.index])
            envelope = envelope or builder
            chunks.append(chunk)
            choice = builder.chunk_choice(chunk, is_first=chunk.index not in started)
            if choice is not None:
                yield envelope.chunk(
                    [choice], prompt_token_ids=None if started else envelope.shown_prompt_ids
                )
                started.add(chunk.index)
    envelope = envelope or _builder(request, shared.choices[0])
    if (last := envelope.usage_chunk(_usage(envelope, chunks))) is not None:
        yield last


async def _whole(choice: SharedCompletion) -> list[ParsedChunk]:
    async with aclosing(choice.follow()) as followed:
        return [chunk async for chunk in followed]


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
