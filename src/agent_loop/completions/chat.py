"""Chat completions: messages in, what the model says and calls out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from agent_loop.chat.multimodal import Encoded
from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.conversation import conversation_of, split_prefill
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_builder import ParsedChunk, ResponseBuilder
from agent_loop.completions.response_models import ChatChoice, ChatCompletion, ChatCompletionChunk
from agent_loop.completions.sampling import (
    Sampler,
    SampleSpec,
    UsageCounter,
    completion_session,
    sample_decoded,
)
from agent_loop.completions.stream_parser import StreamParser
from agent_loop.runtime.concurrency import merged, run_together
from agent_loop.types import IntArray

PROMPT_END_TOKENS = 16
"""So many tokens at the end of the prompt are looked at for reasoning that it opens."""


def create_stream_parser(
    request: ChatCompletionRequest, *, template: ChatTemplate, prompt_ids: IntArray
) -> StreamParser:
    """What reads a completion of this request, which follows these tokens."""
    prompt_end = template.decode(prompt_ids[-PROMPT_END_TOKENS:])
    return StreamParser(
        template.tool_parser,
        tools=request.tools_in_use,
        prompt_end=prompt_end,
        continues=bool(request.continue_final_message),
    )


async def chat_completion(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> ChatCompletion:
    """Answers a chat request in one piece.

    Args:
        request: `stream` in it is not looked at.
        template: Of the model.
        sampler: What samples.
        session: The session of the first of the `n` completions, which the caller ends; the others get one of their
            own. None gives each its own.

    Raises:
        RequestError: The request asks for what is not offered.
        ChatTemplateError: The template does not accept these messages.
        DataError: An image cannot be read.
        SamplingParamsError: A parameter that the server does not offer.
        ServerError: The server refuses or fails the request.
    """
    chat = await _Chat.prepared(request, template=template, sampler=sampler)
    tally = chat.writer.tally()
    choices = await run_together(
        chat.choice(index, session=session if index == 0 else None, tally=tally)
        for index in range(request.num_choices)
    )
    return chat.writer.completion(choices, tally=tally)


async def stream_chat_completion(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> AsyncGenerator[ChatCompletionChunk]:
    """Answers a chat request while the model speaks. Leaving the iteration aborts the completions.

    Text comes at once, up to where it could be the beginning of a call; calls come whole, at the end. The parts
    together are what `chat_completion` returns. Arguments and errors are those of `chat_completion`.
    """
    chat = await _Chat.prepared(request, template=template, sampler=sampler)
    writer = chat.writer
    tally = writer.tally()
    begun: set[int] = set()
    sessions = [session, *[None] * (request.num_choices - 1)]
    steps = merged(
        chat.steps(index, session=session, is_streamed=True) for index, session in enumerate(sessions)
    )
    async with aclosing(steps):
        async for step in steps:
            tally.add(step.part)
            choice = writer.chunk_choice(step, is_first=step.index not in begun)
            if choice is None:
                continue
            yield writer.chunk([choice], prompt_token_ids=None if begun else writer.shown_prompt_ids)
            begun.add(step.index)
    if (last := writer.usage_chunk(tally)) is not None:
        yield last


@dataclass(frozen=True, slots=True)
class _Chat:
    """A request that is ready to be sampled."""

    request: ChatCompletionRequest
    template: ChatTemplate
    sampler: Sampler
    prompt: Encoded
    writer: ResponseBuilder

    @classmethod
    async def prepared(
        cls, request: ChatCompletionRequest, *, template: ChatTemplate, sampler: Sampler
    ) -> _Chat:
        messages, prefill = split_prefill(request, conversation_of(request.messages))
        read = await template.read(messages)
        prompt = template.open_encoded(messages, tools=request.tools_in_use, read=read, prefill=prefill)
        writer = ResponseBuilder(request, template, prompt.token_ids)
        return cls(request, template, sampler, prompt, writer)

    async def steps(
        self, index: int, *, session: str | None, is_streamed: bool
    ) -> AsyncGenerator[ParsedChunk]:
        """Samples and reads one of the completions."""
        request = self.request
        reader = create_stream_parser(request, template=self.template, prompt_ids=self.prompt.token_ids)
        params = request.sampling_params(max_tokens=request.max_new_tokens, choice=index)
        with completion_session(self.sampler, session) as request_id:
            wanted = SampleSpec(
                prompt_ids=self.prompt.token_ids,
                sampling_params=params,
                request_id=request_id,
                attachments=self.prompt.attachments,
                stops=request.stops,
                needs_logprobs=bool(request.logprobs),
                keeps_end_tokens=self.template.tool_parser.reads_end_tokens,
            )
            parts = sample_decoded(
                wanted, sampler=self.sampler, template=self.template, is_streamed=is_streamed
            )
            async with aclosing(parts):
                async for part in parts:
                    reading = reader.feed(part.text)
                    if part.finish_reason is not None:
                        reading += reader.finish()
                    yield ParsedChunk(index, part, reading)

    async def choice(self, index: int, *, session: str | None, tally: UsageCounter) -> ChatChoice:
        """One of the completions in one piece."""
        steps: list[ParsedChunk] = []
        async with aclosing(self.steps(index, session=session, is_streamed=False)) as coming:
            async for step in coming:
                tally.add(step.part)
                steps.append(step)
        return self.writer.choice(index, steps)
