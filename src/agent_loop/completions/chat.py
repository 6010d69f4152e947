"""Chat completions: messages in, what the model says and calls out."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from uuid import uuid4

from agent_loop.chat.multimodal import Encoded
from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.conversation import conversation_of
from agent_loop.completions.reading import CompletionReader, Reading
from agent_loop.completions.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogProbs,
    ChunkChoice,
    Delta,
    FinishReason,
    FunctionCall,
    TokenLogProb,
    ToolCallDelta,
    ToolCallReply,
)
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.sampling import Part, Sampler, Tally, Wanted, sample_parts, session_on
from agent_loop.concurrency import merged, run_together
from agent_loop.types import ToolCall

PROMPT_END_TOKENS = 16
"""So many tokens at the end of the prompt are looked at for reasoning that it opens."""


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
    tally = Tally(prompt_tokens=len(chat.prompt.token_ids))
    choices = await run_together(
        chat.choice(index, session=session if index == 0 else None, tally=tally)
        for index in range(request.num_choices)
    )
    return ChatCompletion(
        id=chat.id,
        created=chat.created,
        model=request.model,
        choices=choices,
        usage=tally.usage,
        prompt_token_ids=chat.prompt.token_ids.tolist() if request.return_token_ids else None,
    )


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
    tally = Tally(prompt_tokens=len(chat.prompt.token_ids))
    prompt_token_ids = chat.prompt.token_ids.tolist() if request.return_token_ids else None
    begun: set[int] = set()
    sessions = [session, *[None] * (request.num_choices - 1)]
    steps = merged(
        chat.steps(index, session=session, as_it_comes=True) for index, session in enumerate(sessions)
    )
    async with aclosing(steps):
        async for step in steps:
            tally.add(step.part)
            choice = chat.chunk_choice(step, is_first=step.index not in begun)
            if choice is None:
                continue
            yield chat.chunk([choice], prompt_token_ids=None if begun else prompt_token_ids)
            begun.add(step.index)
    if request.stream_options is not None and request.stream_options.include_usage:
        yield chat.chunk([]).model_copy(update={"usage": tally.usage})


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step of sampling adds to one of the completions."""

    index: int
    part: Part
    reading: Reading


@dataclass(frozen=True, slots=True)
class _Chat:
    """A request that is ready to be sampled."""

    request: ChatCompletionRequest
    template: ChatTemplate
    sampler: Sampler
    prompt: Encoded
    prompt_end: str
    id: str
    created: int

    @classmethod
    async def prepared(
        cls, request: ChatCompletionRequest, *, template: ChatTemplate, sampler: Sampler
    ) -> _Chat:
        messages = conversation_of(request.messages)
        read = await template.read(messages)
        prompt = template.open_encoded(messages, tools=request.tools_in_use, read=read)
        return cls(
            request=request,
            template=template,
            sampler=sampler,
            prompt=prompt,
            prompt_end=template.decode(prompt.token_ids[-PROMPT_END_TOKENS:]),
            id=f"chatcmpl-{uuid4().hex}",
            created=int(time.time()),
        )

    async def steps(self, index: int, *, session: str | None, as_it_comes: bool) -> AsyncGenerator[_Step]:
        """Samples and reads one of the completions."""
        request = self.request
        reader = CompletionReader(
            self.template.tool_parser, tools=request.tools_in_use, prompt_end=self.prompt_end
        )
        params = request.sampling_params(max_tokens=request.max_new_tokens, choice=index)
        async with session_on(self.sampler, session) as request_id:
            wanted = Wanted(
                prompt_ids=self.prompt.token_ids,
                sampling_params=params,
                request_id=request_id,
                attachments=self.prompt.attachments,
                stops=request.stops,
                needs_log_probs=bool(request.logprobs),
                keeps_end_tokens=self.template.tool_parser.reads_end_tokens,
            )
            parts = sample_parts(
                wanted, sampler=self.sampler, template=self.template, as_it_comes=as_it_comes
            )
            async with aclosing(parts):
                async for part in parts:
                    reading = reader.feed(part.text)
                    if part.finish_reason is not None:
                        reading += reader.finish()
                    yield _Step(index, part, reading)

    async def choice(self, index: int, *, session: str | None, tally: Tally) -> ChatChoice:
        """One of the completions in one piece."""
        steps: list[_Step] = []
        async with aclosing(self.steps(index, session=session, as_it_comes=False)) as coming:
            async for step in coming:
                tally.add(step.part)
                steps.append(step)
        reading = Reading()
        for step in steps:
            reading += step.reading
        token_ids = [token for step in steps for token in step.part.token_ids]
        log_probs = [p for step in steps for p in step.part.log_probs or ()]
        calls = [ToolCallReply(id=i, function=f) for i, f in _written(reading.tool_calls)]
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=reading.content if reading.content or not calls else None,
                reasoning_content=reading.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=_finish_reason(steps[-1].part, has_calls=bool(calls)) or "stop",
            logprobs=self._log_probs(token_ids, log_probs),
            token_ids=token_ids if self.request.return_token_ids else None,
        )

    def chunk_choice(self, step: _Step, *, is_first: bool) -> ChunkChoice | None:
        """The share of one step in the stream; None if it adds nothing that is seen."""
        part, reading = step.part, step.reading
        calls = [
            ToolCallDelta(index=position, id=call_id, function=function)
            for position, (call_id, function) in enumerate(_written(reading.tool_calls))
        ]
        finish_reason = _finish_reason(part, has_calls=bool(calls))
        shows_tokens = bool(self.request.return_token_ids or self.request.logprobs)
        is_empty = not (reading.content or reading.reasoning or calls or finish_reason)
        if is_empty and not is_first and not (shows_tokens and part.token_ids):
            return None
        return ChunkChoice(
            index=step.index,
            delta=Delta(
                role="assistant" if is_first else None,
                content=reading.content or ("" if is_first else None),
                reasoning_content=reading.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=finish_reason,
            logprobs=self._log_probs(part.token_ids, part.log_probs or []),
            token_ids=part.token_ids if self.request.return_token_ids else None,
        )

    def chunk(
        self, choices: list[ChunkChoice], *, prompt_token_ids: list[int] | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> ChoiceLogProbs | None:
        if not self.request.logprobs:
            return None
        both = zip(token_ids, log_probs, strict=True)
        return ChoiceLogProbs(content=[_token_log_prob(self.template, *pair) for pair in both])


def _finish_reason(part: Part, *, has_calls: bool) -> FinishReason | None:
    if part.finish_reason is None:
        return None
    if part.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


def _written(calls: Sequence[ToolCall]) -> list[tuple[str, FunctionCall]]:
    """Each call with an id that is its own: the model's, where its format has ids."""
    written: dict[str, FunctionCall] = {}
    for call in calls:
        call_id = call.id if call.id and call.id not in written else f"call_{uuid4().hex[:24]}"
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        written[call_id] = FunctionCall(name=call.name, arguments=arguments)
    return list(written.items())


def _token_log_prob(template: ChatTemplate, token_id: int, log_prob: float) -> TokenLogProb:
    token = template.decode([token_id])
    is_whole = "\ufffd" not in token
    return TokenLogProb(token=token, logprob=log_prob, bytes=list(token.encode()) if is_whole else None)
