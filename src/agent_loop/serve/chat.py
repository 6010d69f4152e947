"""Chat completions: messages in, assistant messages with tool calls out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_loop.chat.messages import MessageError, normalise_messages, settle_system_messages
from agent_loop.chat.multimodal import Encoded
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError, UnsupportedParameter
from agent_loop.runtime.concurrency import merged
from agent_loop.serve.chat_replies import ChatWriter, JsonObject
from agent_loop.serve.chat_requests import ChatCompletionRequest, ChatMessage
from agent_loop.serve.completions import CompletionReader, ReplyChunk, ReplyHead, Sampler, sample_completion
from agent_loop.serve.stream_parser import ContinuedParser, FirstCallEnd, StreamParser
from agent_loop.types import IntArray, Message, TokenIds, as_token_ids

PROMPT_END_TOKENS = 16
"""Number of tokens at the end of the prompt that are searched for an opened reasoning block."""


@dataclass(frozen=True, slots=True)
class TurnPrefix:
    """Beginning of an assistant turn."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text of the tokens, control tokens included."""
    given: str | None = None
    """Part of the text that the client has already; the response then holds only what follows. None if the client has
    nothing of it."""

    @classmethod
    def of_tokens(
        cls, token_ids: TokenIds, *, template: ChatTemplate, given: str | None = None
    ) -> TurnPrefix:
        """Return the prefix of these tokens."""
        return cls(tuple(int(token) for token in token_ids), template.decode(token_ids), given)


NO_PREFIX = TurnPrefix()


def turn_reader(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    context: IntArray,
    prefix: TurnPrefix = NO_PREFIX,
    index: int = 0,
    **options: Callable[[int], str],
) -> CompletionReader:
    """Return the reader of a completion that answers a chat request. `options` are further ones of the reader."""
    # Without a prefix, the head has a view: copies would grow with the square of the conversation.
    head = ReplyHead(
        np.concatenate([context, as_token_ids(prefix.token_ids)]) if prefix.token_ids else context
    )
    ends_after: FirstCallEnd | None = None
    if request.has_one_call:
        reasoning = template.opened_reasoning(context)
        opened = "" if reasoning is None else reasoning.opening
        ends_after = FirstCallEnd(template, tools=request.tools_in_use, prefix=opened + prefix.text)
    prompt_end = template.decode(context[-PROMPT_END_TOKENS:])
    parser = StreamParser(template.tool_parser, tools=request.tools_in_use, prompt_end=prompt_end)
    before = parser.feed(prefix.text) if prefix.given is None else None
    return CompletionReader(
        template,
        head,
        index=index,
        parser=parser
        if prefix.given is None
        else ContinuedParser(parser, begun=prefix.text, given=prefix.given),
        stops=request.stops,
        prefix=prefix.token_ids,
        before=before,
        ends_after=ends_after,
        needs_logprobs=bool(request.logprobs),
        **options,
    )


async def chat_completion(
    request: ChatCompletionRequest | Mapping[str, Any], *, template: ChatTemplate, sampler: Sampler
) -> JsonObject:
    """Return the whole chat completion at once, as the body of a response of OpenAI's API.

    Args:
        request: The request. Its field `stream` is ignored. Its `session_id` is the session of the first of its `n`
            completions, which the caller ends. The others get their own sessions, as do all of them without the field.
        template: Chat template of the model.
        sampler: Samples the completions.

    Raises:
        RequestError: The request uses a feature that is not supported.
        ChatTemplateError: The chat template rejects the messages.
        DataError: An image cannot be read.
        SamplingParamsError: The server does not support a sampling parameter.
        ServerError: The server refused the request or failed.
    """
    request = ChatCompletionRequest.read(request).model_copy(update={"stream": False})
    async with aclosing(sample_chat(request, template=template, sampler=sampler)) as chunks:
        return ChatWriter(request, template).whole([chunk async for chunk in chunks])


async def count_prompt_tokens(request: ChatCompletionRequest, *, template: ChatTemplate) -> int:
    """Return the number of tokens in the prompt of a request. Same errors as `chat_completion`."""
    _, encoded, prefix = await _rendered(request, template=template)
    return len(encoded.token_ids) + len(prefix.token_ids)


async def _rendered(
    request: ChatCompletionRequest, *, template: ChatTemplate
) -> tuple[ChatTemplate, Encoded, TurnPrefix]:
    """Return the template with the variables of a request, the tokens before the turn, and its beginning."""
    check_calls(request, template)
    template = template_of(request, template)
    written = settle_system_messages(conversation_of(request.messages), template)
    messages, prefill = split_prefill(request, written)
    read = await template.read(messages)
    encoded = template.open_encoded(messages, tools=request.tools_in_use, read=read)
    return (
        template,
        encoded,
        begin_turn(request, template=template, context=encoded.token_ids, prefill=prefill),
    )


async def sample_chat(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    check_prompt: Callable[[IntArray], None] | None = None,
) -> AsyncGenerator[ReplyChunk]:
    """Yield the chunks of all completions of a request as they are sampled. Closing the iterator aborts them.

    Text is sent immediately, unless it may be the start of a tool call. Tool calls are sent whole, at the end.
    """
    template, encoded, prefix = await _rendered(request, template=template)
    readers = [
        turn_reader(request, template=template, context=encoded.token_ids, prefix=prefix, index=index)
        for index in range(request.num_choices)
    ]
    if check_prompt is not None:
        check_prompt(readers[0].head.prompt_ids)
    choices = [
        sample_completion(
            reader,
            request.sampling_params(max_tokens=request.max_new_tokens, choice=index),
            sampler=sampler,
            session=None if index else request.session_id,
            is_streamed=request.stream,
            attachments=encoded.attachments,
        )
        for index, reader in enumerate(readers)
    ]
    async with aclosing(merged(choices)) as chunks:
        async for chunk in chunks:
            yield chunk


def conversation_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages in the form that a `ChatTemplate` takes. See `normalise_messages`."""
    given = [message.as_message() for message in messages]
    try:
        return normalise_messages(given, where="messages")
    except MessageError as error:
        raise RequestError(str(error), param=error.where) from error


def split_prefill(request: ChatCompletionRequest, messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Return the messages before the completion, and the text that the completion continues.

    The text is empty unless the request sets `continue_final_message`.
    """
    continues = bool(request.continue_final_message)
    if request.add_generation_prompt is not None and request.add_generation_prompt == continues:
        raise RequestError(
            f"add_generation_prompt and continue_final_message are both {str(continues).lower()}; leave "
            "add_generation_prompt out",
            param="add_generation_prompt",
        )
    if not continues:
        return list(messages), ""
    *earlier, last = messages
    text = last["content"]
    is_text_alone = (
        isinstance(text, str) and text and not last.get("tool_calls") and not last.get("reasoning_content")
    )
    if last["role"] != "assistant" or not is_text_alone:
        raise RequestError(
            "continue_final_message: the last message must be an assistant message with a text, and without tool_calls "
            "or reasoning_content; change the last message, or leave continue_final_message out",
            param="continue_final_message",
        )
    if not earlier:
        raise RequestError(
            "continue_final_message: there is no message before the last one; add the message that it answers",
            param="messages",
        )
    return earlier, text


def begin_turn(
    request: ChatCompletionRequest, *, template: ChatTemplate, context: IntArray, prefill: str = ""
) -> TurnPrefix:
    """Return the prefix of the completion that answers a request.

    Reasoning that the prompt opens is closed first, because a forced call or a schema covers the whole completion.

    Args:
        request: The request.
        template: Chat template of the conversation.
        context: Tokens before the turn, with the generation prompt.
        prefill: Text that the completion continues. Control tokens in it become plain text.
    """
    parser, reasoning = template.tool_parser, template.opened_reasoning(context)
    if prefill:
        if reasoning is not None:
            raise RequestError(
                "continue_final_message: the chat template begins each turn of the assistant with reasoning, so that "
                "its answer cannot be continued; switch thinking off with chat_template_kwargs if the template allows "
                "it, or leave continue_final_message out",
                param="continue_final_message",
            )
        text = parser.content_opening + template.encoder.mask(prefill)
        return TurnPrefix.of_tokens(template.encoder.encode(text), template=template, given=prefill)
    if not request.forces_call and not request.json_schema:
        return NO_PREFIX
    closing = "" if reasoning is None else f"\n{reasoning.closing}\n\n"
    opening = parser.content_opening
    if request.forces_call:
        opening = _opening_of_call(request, template)
    if not (text := closing + opening):
        return NO_PREFIX
    return TurnPrefix.of_tokens(template.encoder.encode(text), template=template)


def check_calls(request: ChatCompletionRequest, template: ChatTemplate) -> None:
    """Refuse a request whose wishes about calls the model's format cannot express."""
    if request.forces_call:
        _opening_of_call(request, template)
    if request.has_one_call and not template.tool_parser.first_call_ends:
        raise UnsupportedParameter(
            "parallel_tool_calls: false is not supported, because the model's tool format does not mark the end of a "
            "call; leave it out",
            param="parallel_tool_calls",
        )
    if request.json_schema and (request.tools_in_use or request.continue_final_message):
        other = "continue_final_message" if request.continue_final_message else "tools"
        raise UnsupportedParameter(
            f"response_format and {other} are not supported together, because the schema covers the whole completion; "
            "send one of them",
            param="response_format",
        )
    if request.forces_call and request.continue_final_message:
        raise UnsupportedParameter(
            "tool_choice cannot force a call in a message that is continued; send one of tool_choice and "
            "continue_final_message",
            param="tool_choice",
        )


def _opening_of_call(request: ChatCompletionRequest, template: ChatTemplate) -> str:
    """Return the text that opens the call which the request forces. Raises an error if the format has none."""
    name = request.forced_tool
    opening = template.tool_parser.forced_call(
        None if name is None else template.encoder.mask(name),
        chat_template=str(template.tokenizer.chat_template),
    )
    if opening is None:
        raise UnsupportedParameter(
            "tool_choice: a forced call is not supported, because the model's tool format has no fixed opening for it; "
            "give auto or none",
            param="tool_choice",
        )
    return opening


def template_of(request: ChatCompletionRequest, template: ChatTemplate) -> ChatTemplate:
    """Return the chat template with the variables that a request sets.

    `reasoning_effort` is a variable if the template mentions it, and is ignored otherwise.
    """
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None and template.mentions("reasoning_effort"):
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return template.with_variables(variables)
