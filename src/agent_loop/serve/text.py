"""Text completions: text or token ids in, text and token ids out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, cast
from uuid import uuid4

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.runtime.concurrency import merged, run_together
from agent_loop.serve.chat_replies import (
    TextCompletion,
    TextCompletionChoice,
    TextCompletionLogProbs,
    usage_of,
)
from agent_loop.serve.chat_requests import CompletionRequest
from agent_loop.serve.sampling import ChunkDecoder, DecodedChunk, Sampler, completion_session, token_chunks
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.prompt_logprobs import MINUS_INFINITY
from agent_loop.servers.scores import TokenScores, checked_text
from agent_loop.types import IntArray, as_token_ids

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024
"""Maximum number of completions of one request, over all of its prompts."""


async def completion(
    request: CompletionRequest, *, template: ChatTemplate, sampler: Sampler
) -> TextCompletion:
    """Complete each prompt `n` times. Choice `p * n + i` is the i-th completion of prompt `p`.

    Sessions are those of `chat_completion`. Only the template's tokenizer is used.
    """
    prepared = _PreparedRequest.create(request, template=template, sampler=sampler)
    sampled = await run_together(prepared.sampled(index) for index in range(prepared.num_choices))
    choices = [prepared.choice(index, chunks) for index, chunks in enumerate(sampled)]
    return prepared.response(choices, sampled=[chunk for chunks in sampled for chunk in chunks])


async def stream_completion(
    request: CompletionRequest, *, template: ChatTemplate, sampler: Sampler
) -> AsyncGenerator[TextCompletion]:
    """Yield the completions in chunks while they are sampled. Closing the iterator aborts the completions.

    Arguments and errors are those of `completion`.
    """
    prepared = _PreparedRequest.create(request, template=template, sampler=sampler)
    sampled: list[DecodedChunk] = []
    offsets = [0] * prepared.num_choices
    started: set[int] = set()
    chunks = merged(prepared.chunks(index, is_streamed=True) for index in range(prepared.num_choices))
    async with aclosing(chunks):
        async for index, chunk in chunks:
            sampled.append(chunk)
            shows_tokens = request.return_token_ids or request.wants_logprobs
            if not chunk.text and chunk.finish_reason is None and not (shows_tokens and chunk.token_ids):
                continue
            yield prepared.response(
                [prepared.chunk_choice(index, chunk, offset=offsets[index], is_first=index not in started)]
            )
            started.add(index)
            offsets[index] += len(chunk.text)
    if request.stream_options is not None and request.stream_options.include_usage:
        yield prepared.response([], sampled=sampled)


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

    async def chunks(self, index: int, *, is_streamed: bool) -> AsyncGenerator[tuple[int, DecodedChunk]]:
        """Sample one of the completions, and yield its index with each chunk."""
        request = self.request
        prompt, number = divmod(index, request.num_choices)
        params = request.sampling_params(max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS, choice=number)
        with completion_session(self.sampler, None if index else request.session_id) as request_id:
            decoder = ChunkDecoder(self.template, stops=request.stops, needs_logprobs=request.wants_logprobs)
            chunks = token_chunks(
                self.sampler,
                self.prompts[prompt],
                params,
                request_id,
                is_streamed=is_streamed or decoder.is_token_by_token,
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    for decoded in decoder.feed(chunk):
                        yield index, decoded
                        if decoded.finish_reason is not None:
                            return

    async def sampled(self, index: int) -> list[DecodedChunk]:
        """Sample one of the completions."""
        async with aclosing(self.chunks(index, is_streamed=False)) as chunks:
            return [chunk async for _, chunk in chunks]

    def choice(self, index: int, chunks: Sequence[DecodedChunk]) -> TextCompletionChoice:
        """Return a whole completion."""
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

    def response(
        self, choices: list[TextCompletionChoice], *, sampled: Sequence[DecodedChunk] | None = None
    ) -> TextCompletion:
        """Return a response, with the token counts of `sampled` if it is given."""
        num_prompt_tokens = sum(map(len, self.prompts))
        return TextCompletion(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            usage=None if sampled is None else usage_of(sampled, prompt_tokens=num_prompt_tokens),
        )

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
    """Return the token ids of each prompt of a request."""
    given: Any = request.prompt
    several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    prompts = [
        as_token_ids(template.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        for prompt in several
    ]
    if any(not len(prompt) for prompt in prompts):
        raise RequestError("prompt is empty; give at least one token", param="prompt")
    return prompts


async def score_prompts(
    request: CompletionRequest,
    *,
    template: ChatTemplate,
    manager: AsyncLLMServerManager,
    max_model_len: int | None,
) -> Mapping[str, Any]:
    """Return the response to a request with `prompt_logprobs`: the log-probs of the tokens of each prompt.

    The log-probs are by token id at each place: those of the prompt's own token and of the likeliest tokens. The first
    token, which nothing predicts, has none. -9999 stands for minus infinity.

    Args:
        request: A request whose `is_scored` is true.
        template: Chat template of the model. Only its tokenizer is used.
        manager: Servers that score the prompts.
        max_model_len: Maximum number of tokens of a prompt; None leaves the check to the servers.
    """
    num_top = request.prompt_logprobs or 0
    prompts = [
        checked_text(prompt, start=1, top_logprobs=num_top, server="", max_model_len=max_model_len)
        for prompt in prompts_of(request, template=template)
    ]
    scores = await run_together(manager.score(prompt, top_logprobs=num_top) for prompt in prompts)
    places = [_places(prompt, each) for prompt, each in zip(prompts, scores, strict=True)]
    choice: dict[str, Any] = {"text": "", "finish_reason": "length", "token_ids": []}
    return {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": i, **choice, "prompt_logprobs": each} for i, each in enumerate(places)],
        "usage": usage_of((), prompt_tokens=sum(map(len, prompts))),
    }


def _places(prompt: IntArray, scores: TokenScores) -> list[dict[int, dict[str, float]] | None]:
    own = zip(prompt[1:].tolist(), scores.logprobs.clip(MINUS_INFINITY).tolist(), strict=True)
    places = [{token: {"logprob": logprob}} for token, logprob in own]
    if scores.top_ids is not None and scores.top_logprobs is not None:
        likeliest = zip(
            scores.top_ids.tolist(), scores.top_logprobs.clip(MINUS_INFINITY).tolist(), strict=True
        )
        for place, (tokens, logprobs) in zip(places, likeliest, strict=True):
            place |= {token: {"logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)}
    return [None, *places]
