"""An answer in the shape that a request asked for."""

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


async def build_completion(request: ChatCompletionRequest, answer: SharedCompletion) -> ChatCompletion:
    """In one piece.

    Raises:
        AgentLoopError: The completion failed.
    """
    async with aclosing(answer.follow()) as coming:
        steps = [step async for step in coming]
    writer = _writer(request, answer)
    return writer.completion([writer.choice(0, steps)], tally=_tally(writer, steps))


async def stream_chunks(
    request: ChatCompletionRequest, answer: SharedCompletion
) -> AsyncGenerator[ChatCompletionChunk]:
    """In parts, while the model speaks.

    Raises:
        AgentLoopError: The completion failed.
    """
    steps: list[ParsedChunk] = []
    is_first = True
    async with aclosing(answer.follow()) as coming:
        async for step in coming:
            writer = _writer(request, answer)
            steps.append(step)
            choice = writer.chunk_choice(step, is_first=is_first)
            if choice is not None:
                yield writer.chunk([choice], prompt_token_ids=writer.shown_prompt_ids if is_first else None)
                is_first = False
    writer = _writer(request, answer)
    if (last := writer.usage_chunk(_tally(writer, steps))) is not None:
        yield last


def _tally(writer: ResponseBuilder, steps: Sequence[ParsedChunk]) -> UsageCounter:
    tally = writer.tally()
    for step in steps:
        tally.add(step.part)
    return tally


def _writer(request: ChatCompletionRequest, answer: SharedCompletion) -> ResponseBuilder:
    """For whoever listens: the answer is one, its shape is the request's."""
    if answer.writer is None:
        raise ServerError("the completion ended before it began; send the request again")
    return replace(answer.writer, request=request)
