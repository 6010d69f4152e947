"""Chat completions: messages in, assistant messages with tool calls out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from agent_loop.chat.messages import settle_system_messages
from agent_loop.chat.multimodal import Encoded
from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.continued_parser import ContinuedParser
from agent_loop.completions.conversation import conversation_of, split_prefill
from agent_loop.completions.first_call import FirstCallEnd
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
from agent_loop.completions.stream_parser import ParsedDelta, StreamParser
from agent_loop.completions.turn_prefix import NO_PREFIX, TurnPrefix, begin_turn, check_calls, template_of
from agent_loop.runtime.concurrency import merged, run_together
from agent_loop.types import IntArray, as_token_ids

PROMPT_END_TOKENS = 16
"""Number of tokens at the end of the prompt that are searched for an opened reasoning block."""


def create_stream_parser(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    context: IntArray,
    prefix: TurnPrefix = NO_PREFIX,
) -> tuple[StreamParser | ContinuedParser, ParsedDelta]:
    """Return a parser for a completion of this request, and what the prefix adds to the response.

    Args:
        request: The request.
        template: Chat template of the conversation.
        context: Tokens before the turn.
        prefix: Beginning of the turn.
    """
    prompt_end = template.decode(context[-PROMPT_END_TOKENS:])
    parser = StreamParser(template.tool_parser, tools=request.tools_in_use, prompt_end=prompt_end)
    if prefix.given is None:
        return parser, parser.feed(prefix.text)
    return ContinuedParser(parser, begun=prefix.text, given=prefix.given), ParsedDelta()


def first_call_end(
    request: ChatCompletionRequest, *, template: ChatTemplate, context: IntArray, prefix: TurnPrefix
) -> FirstCallEnd | None:
    """Return what ends the completion after its first call; None if the request allows several calls."""
    if not request.has_one_call:
        return None
    reasoning = template.opened_reasoning(context)
    before = "" if reasoning is None else reasoning.opening
    return FirstCallEnd(template, tools=request.tools_in_use, prefix=before + prefix.text)


async def chat_completion(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> ChatCompletion:
    """Return the whole chat completion at once.

    Args:
        request: The request. Its field `stream` is ignored.
        template: Chat template of the model.
        sampler: Samples the completions.
        session: Session of the first of the `n` completions, which the caller ends. The other completions get their
            own sessions, as do all of them if this is None.

    Raises:
        RequestError: The request uses a feature that is not supported.
        ChatTemplateError: The chat template rejects the messages.
        DataError: An image cannot be read.
        SamplingParamsError: The server does not support a sampling parameter.
        ServerError: The server refused the request or failed.
    """
    chat = await _Chat.prepared(request, template=template, sampler=sampler)
    usage = chat.builder.usage_counter()
    choices = await run_together(
        chat.choice(index, session=session if index == 0 else None, usage=usage)
        for index in range(request.num_choices)
    )
    return chat.builder.completion(choices, usage=usage)


async def stream_chat_completion(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> AsyncGenerator[ChatCompletionChunk]:
    """Yield a chat completion in chunks while it is sampled. Closing the iterator aborts the completions.

    Text is sent immediately, unless it may be the start of a tool call. Tool calls are sent whole, at the end. The
    chunks add up to the result of `chat_completion`, which has the same arguments and errors.
    """
    chat = await _Chat.prepared(request, template=template, sampler=sampler)
    builder = chat.builder
    usage = builder.usage_counter()
    started: set[int] = set()
    sessions = [session, *[None] * (request.num_choices - 1)]
    chunks = merged(
        chat.chunks(index, session=session, is_streamed=True) for index, session in enumerate(sessions)
    )
    async with aclosing(chunks):
        async for chunk in chunks:
            usage.add(chunk.decoded)
            choice = builder.chunk_choice(chunk, is_first=chunk.index not in started)
            if choice is None:
                continue
            yield builder.chunk([choice], prompt_token_ids=None if started else builder.shown_prompt_ids)
            started.add(chunk.index)
    if (last := builder.usage_chunk(usage)) is not None:
        yield last


async def count_prompt_tokens(request: ChatCompletionRequest, *, template: ChatTemplate) -> int:
    """Return the number of tokens in the prompt of a request. Same errors as `chat_completion`."""
    return len((await ChatPrompt.rendered(request, template=template)).token_ids)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Rendered prompt of a chat request."""

    template: ChatTemplate
    """The model's template with the variables of the request."""
    encoded: Encoded
    """Tokens before the turn."""
    prefix: TurnPrefix

    @classmethod
    async def rendered(cls, request: ChatCompletionRequest, *, template: ChatTemplate) -> ChatPrompt:
        """Render the prompt of a request.

        Raises:
            RequestError: The request uses a feature that is not supported.
            ChatTemplateError: The chat template rejects the messages.
            DataError: An image cannot be read.
        """
        check_calls(request, template)
        template = template_of(request, template)
        written = settle_system_messages(conversation_of(request.messages), template)
        messages, prefill = split_prefill(request, written)
        read = await template.read(messages)
        encoded = template.open_encoded(messages, tools=request.tools_in_use, read=read)
        prefix = begin_turn(request, template=template, context=encoded.token_ids, prefill=prefill)
        return cls(template, encoded, prefix)

    @property
    def token_ids(self) -> IntArray:
        """All tokens before the first sampled one."""
        return np.concatenate([self.encoded.token_ids, as_token_ids(self.prefix.token_ids)])


@dataclass(frozen=True, slots=True)
class _Chat:
    """Chat request with its rendered prompt."""

    request: ChatCompletionRequest
    template: ChatTemplate
    sampler: Sampler
    prompt: Encoded
    """Tokens before the turn."""
    prefix: TurnPrefix
    builder: ResponseBuilder

    @classmethod
    async def prepared(
        cls, request: ChatCompletionRequest, *, template: ChatTemplate, sampler: Sampler
    ) -> _Chat:
        prompt = await ChatPrompt.rendered(request, template=template)
        builder = ResponseBuilder(request, prompt.template, prompt.token_ids)
        return cls(request, prompt.template, sampler, prompt.encoded, prompt.prefix, builder)

    async def chunks(
        self, index: int, *, session: str | None, is_streamed: bool
    ) -> AsyncGenerator[ParsedChunk]:
        """Sample and parse one of the completions."""
        request = self.request
        context, prefix = self.prompt.token_ids, self.prefix
        parser, before = create_stream_parser(request, template=self.template, context=context, prefix=prefix)
        params = request.sampling_params(max_tokens=request.max_new_tokens, choice=index)
        with completion_session(self.sampler, session) as request_id:
            spec = SampleSpec(
                prompt_ids=self.builder.prompt_ids,
                sampling_params=params,
                request_id=request_id,
                attachments=self.prompt.attachments,
                stops=request.stops,
                needs_logprobs=bool(request.logprobs),
                keeps_end_tokens=self.template.tool_parser.reads_end_tokens,
                prefix=prefix.token_ids,
                ends_after=first_call_end(request, template=self.template, context=context, prefix=prefix),
            )
            decoded_chunks = sample_decoded(
                spec, sampler=self.sampler, template=self.template, is_streamed=is_streamed
            )
            async with aclosing(decoded_chunks):
                async for decoded in decoded_chunks:
                    delta = before + parser.feed(decoded.text)
                    before = ParsedDelta()
                    if decoded.finish_reason is not None:
                        delta += parser.finish()
                    yield ParsedChunk(index, decoded, delta)

    async def choice(self, index: int, *, session: str | None, usage: UsageCounter) -> ChatChoice:
        """Sample one of the completions and return it whole."""
        chunks: list[ParsedChunk] = []
        async with aclosing(self.chunks(index, session=session, is_streamed=False)) as sampled:
            async for chunk in sampled:
                usage.add(chunk.decoded)
                chunks.append(chunk)
        return self.builder.choice(index, chunks)
