"""Text completions: text or token ids in, text and token ids out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.runtime.concurrency import merged, run_together
from agent_loop.serve.chat_replies import (
    DONE,
    JsonObject,
    ParsedChunk,
    ReplyHead,
    Usage,
    by_choice,
    server_sent_event,
)
from agent_loop.serve.chat_requests import CompletionRequest
from agent_loop.serve.errors import ErrorReply
from agent_loop.serve.fields import without_none
from agent_loop.serve.sampling import ChunkDecoder, DecodedChunk, Sampler, completion_session, token_chunks
from agent_loop.serve.stream_parser import ParsedDelta
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scores import MINUS_INFINITY, TokenScores, checked_text
from agent_loop.types import IntArray, as_token_ids

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024
"""Maximum number of completions of one request, over all of its prompts."""


def prompts_of(request: CompletionRequest, *, template: ChatTemplate) -> list[IntArray]:
    """Return the token ids of each prompt of a request. Only the template's tokenizer is used."""
    given: Any = request.prompt
    several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    prompts = [
        as_token_ids(template.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        for prompt in several
    ]
    if any(not len(prompt) for prompt in prompts):
        raise RequestError("prompt is empty; give at least one token", param="prompt")
    if len(prompts) * request.num_choices > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {request.num_choices} are more than {MAX_CHOICES} completions; "
            "send several requests",
            param="n",
        )
    return prompts


async def sample_text(
    request: CompletionRequest, prompts: Sequence[IntArray], *, template: ChatTemplate, sampler: Sampler
) -> AsyncGenerator[ParsedChunk]:
    """Complete each prompt `n` times, and yield the chunks as they are sampled. Closing the iterator aborts them.

    Choice `p * n + i` is the i-th completion of prompt `p`. Sessions are those of `chat_completion`.
    """
    heads = [ReplyHead(prompt) for prompt in prompts for _ in range(request.num_choices)]
    choices = [
        _sample_choice(request, head, template, sampler, index=index) for index, head in enumerate(heads)
    ]
    async with aclosing(merged(choices)) as chunks:
        async for chunk in chunks:
            yield chunk


async def _sample_choice(
    request: CompletionRequest, head: ReplyHead, template: ChatTemplate, sampler: Sampler, *, index: int
) -> AsyncGenerator[ParsedChunk]:
    max_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
    params = request.sampling_params(max_tokens=max_tokens, choice=index % request.num_choices)
    decoder = ChunkDecoder(template, stops=request.stops, needs_logprobs=request.wants_logprobs)
    with completion_session(sampler, None if index else request.session_id) as session:
        is_streamed = bool(request.stream) or decoder.is_token_by_token
        chunks = token_chunks(sampler, head.prompt_ids, params, session, is_streamed=is_streamed)
        async with aclosing(chunks):
            async for chunk in chunks:
                for decoded in decoder.feed(chunk):
                    yield ParsedChunk(head, index, decoded, ParsedDelta(decoded.text))
                    if decoded.finish_reason is not None:
                        return


class TextWriter:
    """Writes a text completion."""

    def __init__(self, request: CompletionRequest, *, template: ChatTemplate, num_prompt_tokens: int) -> None:
        self._request = request
        self._template = template
        self._num_prompt_tokens = num_prompt_tokens
        self._chunks: list[ParsedChunk] = []
        self._offsets: dict[int, int] = {}
        """Number of characters sent of each completion that has begun."""

    def whole(self, chunks: Sequence[ParsedChunk]) -> JsonObject:
        choices = [self._choice(choice) for choice in by_choice(chunks)]
        return self._body(chunks[0], choices=choices, usage=self._usage(chunks))

    def chunk(self, chunk: ParsedChunk) -> bytes:
        self._chunks.append(chunk)
        decoded = chunk.decoded
        shows_tokens = self._request.return_token_ids or self._request.wants_logprobs
        if not decoded.text and decoded.finish_reason is None and not (shows_tokens and decoded.token_ids):
            return b""
        return server_sent_event(self._body(self._chunks[0], choices=[self._choice(chunk)]))

    def error(self, error: ErrorReply) -> bytes:
        return server_sent_event(error.as_openai())

    def end(self) -> bytes:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return DONE
        usage = self._usage(self._chunks)
        return server_sent_event(self._body(self._chunks[0], choices=[], usage=usage)) + DONE

    def _usage(self, chunks: Sequence[ParsedChunk]) -> JsonObject:
        usage = Usage.of(chunks)
        return Usage(self._num_prompt_tokens, usage.completion_tokens, usage.cached_tokens).as_openai()

    def _body(self, chunk: ParsedChunk, **fields: Any) -> JsonObject:
        return {
            "id": f"cmpl-{chunk.head.id}",
            "object": "text_completion",
            "created": chunk.head.created,
            "model": self._request.model,
            **fields,
        }

    def _choice(self, chunk: ParsedChunk) -> JsonObject:
        decoded, shows_ids = chunk.decoded, bool(self._request.return_token_ids)
        is_first = chunk.index not in self._offsets
        offset = self._offsets.get(chunk.index, 0)
        self._offsets[chunk.index] = offset + len(decoded.text)
        more = {
            "token_ids": decoded.token_ids if shows_ids else None,
            "prompt_token_ids": chunk.head.prompt_ids.tolist() if shows_ids and is_first else None,
        }
        return {
            "index": chunk.index,
            "text": decoded.text,
            "finish_reason": decoded.finish_reason,
            "logprobs": self._logprobs(decoded, offset=offset) if self._request.wants_logprobs else None,
            **without_none(more),
        }

    def _logprobs(self, decoded: DecodedChunk, *, offset: int) -> JsonObject:
        tokens = [self._template.decode([token]) for token in decoded.token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        logprobs: JsonObject = {
            "tokens": tokens,
            "token_logprobs": list(decoded.logprobs or ()),
            "text_offset": offsets,
        }
        if self._request.num_top_logprobs:
            logprobs["top_logprobs"] = [
                {self._template.decode([token]): logprob for token, logprob in reversed(top)}
                for top in decoded.top_logprobs or ()
            ]
        return logprobs


async def score_prompts(
    request: CompletionRequest,
    *,
    template: ChatTemplate,
    manager: AsyncLLMServerManager,
    max_model_len: int | None,
) -> JsonObject:
    """Return the response to a request with `prompt_logprobs`: the log-probs of the tokens of each prompt.

    The log-probs are by token id at each place: those of the prompt's own token and of the likeliest tokens. The first
    token, which nothing predicts, has none. -9999 stands for minus infinity.
    """
    num_top = request.prompt_logprobs or 0
    prompts = [
        checked_text(prompt, start=1, top_logprobs=num_top, server="", max_model_len=max_model_len)
        for prompt in prompts_of(request, template=template)
    ]
    scores = await run_together(manager.score(prompt, top_logprobs=num_top) for prompt in prompts)
    places = [_places(prompt, each) for prompt, each in zip(prompts, scores, strict=True)]
    choice: JsonObject = {"text": "", "finish_reason": "length", "token_ids": []}
    return {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": i, **choice, "prompt_logprobs": each} for i, each in enumerate(places)],
        "usage": Usage(sum(map(len, prompts))).as_openai(),
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
