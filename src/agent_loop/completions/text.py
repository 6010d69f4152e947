"""Text completions: text or token ids in, text and token ids out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, cast
from uuid import uuid4

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.requests import CompletionRequest
from agent_loop.completions.response_models import (
    TextCompletion,
    TextCompletionChoice,
    TextCompletionLogProbs,
)
from agent_loop.completions.sampling import (
    DecodedChunk,
    Sampler,
    SampleSpec,
    UsageCounter,
    completion_session,
    sample_decoded,
)
from agent_loop.errors import RequestError
from agent_loop.runtime.concurrency import merged, run_together
from agent_loop.types import IntArray, as_token_ids

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024
"""Maximum number of completions of one request, over all of its prompts."""


async def completion(
    request: CompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> TextCompletion:
    """Complete each prompt `n` times. Choice `p * n + i` is the i-th completion of prompt `p`.

    Args:
        request: The request. Its field `stream` is ignored.
        template: Chat template of the model. Only its tokenizer is used.
        sampler: Samples the completions.
        session: Session of the first completion, which the caller ends. The other completions get their own sessions,
            as do all of them if this is None.

    Raises:
        RequestError: The request uses a feature that is not supported.
        SamplingParamsError: The server does not support a sampling parameter.
        ServerError: The server refused the request or failed.
    """
    prepared = _PreparedRequest.create(request, template=template, sampler=sampler)
    usage = prepared.usage_counter()
    choices = await run_together(
        prepared.choice(index, session=session if index == 0 else None, usage=usage)
        for index in range(prepared.num_choices)
    )
    return prepared.response(choices).model_copy(update={"usage": usage.usage})


async def stream_completion(
    request: CompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> AsyncGenerator[TextCompletion]:
    """Yield the completions in chunks while they are sampled. Closing the iterator aborts the completions.

    Arguments and errors are those of `completion`.
    """
    prepared = _PreparedRequest.create(request, template=template, sampler=sampler)
    usage = prepared.usage_counter()
    offsets = [0] * prepared.num_choices
    started: set[int] = set()
    sessions = [session, *[None] * (prepared.num_choices - 1)]
    chunks = merged(
        prepared.chunks(index, session=own, is_streamed=True) for index, own in enumerate(sessions)
    )
    async with aclosing(chunks):
        async for index, chunk in chunks:
            usage.add(chunk)
            shows_tokens = request.return_token_ids or request.wants_logprobs
            if not chunk.text and chunk.finish_reason is None and not (shows_tokens and chunk.token_ids):
                continue
            yield prepared.response(
                [prepared.chunk_choice(index, chunk, offset=offsets[index], is_first=index not in started)]
            )
            started.add(index)
            offsets[index] += len(chunk.text)
    if request.stream_options is not None and request.stream_options.include_usage:
        yield prepared.response([]).model_copy(update={"usage": usage.usage})


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """Text completion request with its encoded prompts."""

    request: CompletionRequest
    template: ChatTemplate
    sampler: Sampler
    prompts: Sequence[IntArray]
    id: str
    created: int

    @classmethod
    def create(
        cls, request: CompletionRequest, *, template: ChatTemplate, sampler: Sampler
    ) -> _PreparedRequest:
        prompts = prompts_of(request, template=template)
        if len(prompts) * request.num_choices > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n = {request.num_choices} are more than {MAX_CHOICES} completions; "
                "send several requests",
                param="n",
            )
        return cls(request, template, sampler, prompts, f"cmpl-{uuid4().hex}", int(time.time()))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.num_choices

    def usage_counter(self) -> UsageCounter:
        return UsageCounter(prompt_tokens=sum(map(len, self.prompts)))

    async def chunks(
        self, index: int, *, session: str | None, is_streamed: bool
    ) -> AsyncGenerator[tuple[int, DecodedChunk]]:
        """Sample one of the completions, and yield its index with each chunk."""
        request = self.request
        prompt, number = divmod(index, request.num_choices)
        params = request.sampling_params(max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS, choice=number)
        with completion_session(self.sampler, session) as request_id:
            spec = SampleSpec(
                prompt_ids=self.prompts[prompt],
                sampling_params=params,
                request_id=request_id,
                stops=request.stops,
                needs_logprobs=request.wants_logprobs,
            )
            chunks = sample_decoded(
                spec, sampler=self.sampler, template=self.template, is_streamed=is_streamed
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield index, chunk

    async def choice(self, index: int, *, session: str | None, usage: UsageCounter) -> TextCompletionChoice:
        """Sample one of the completions and return it whole."""
        chunks: list[DecodedChunk] = []
        async with aclosing(self.chunks(index, session=session, is_streamed=False)) as sampled:
            async for _, chunk in sampled:
                usage.add(chunk)
                chunks.append(chunk)
        whole = DecodedChunk(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            logprobs=[p for chunk in chunks for p in chunk.logprobs or ()],
            finish_reason=chunks[-1].finish_reason,
            top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs or ()],
        )
        return self.chunk_choice(index, whole, offset=0, is_first=True)

    def chunk_choice(
        self, index: int, chunk: DecodedChunk, *, offset: int, is_first: bool
    ) -> TextCompletionChoice:
        shows_ids = bool(self.request.return_token_ids)
        prompt = self.prompts[index // self.request.num_choices]
        return TextCompletionChoice(
            index=index,
            text=chunk.text,
            finish_reason=cast(Literal["stop", "length"] | None, chunk.finish_reason),
            logprobs=self._logprobs(chunk, offset=offset) if self.request.wants_logprobs else None,
            token_ids=chunk.token_ids if shows_ids else None,
            prompt_token_ids=prompt.tolist() if shows_ids and is_first else None,
        )

    def response(self, choices: list[TextCompletionChoice]) -> TextCompletion:
        return TextCompletion(id=self.id, created=self.created, model=self.request.model, choices=choices)

    def _logprobs(self, chunk: DecodedChunk, *, offset: int) -> TextCompletionLogProbs:
        tokens = [self.template.decode([token]) for token in chunk.token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        tops = [
            {self.template.decode([token]): logprob for token, logprob in reversed(top)}
            for top in chunk.top_logprobs or ()
        ]
        return TextCompletionLogProbs(
            tokens=tokens,
            token_logprobs=list(chunk.logprobs or ()),
            text_offset=offsets,
            top_logprobs=tops if self.request.num_top_logprobs else None,
        )


def prompts_of(request: CompletionRequest, *, template: ChatTemplate) -> list[IntArray]:
    """Return the token ids of each prompt of a request.

    Raises:
        RequestError: A prompt is empty.
    """
    given: Any = request.prompt
    several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    prompts = [
        as_token_ids(template.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        for prompt in several
    ]
    if any(not len(prompt) for prompt in prompts):
        raise RequestError("prompt is empty; give at least one token", param="prompt")
    return prompts
