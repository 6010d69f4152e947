"""Text completions: text or token ids in, text and token ids out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from uuid import uuid4

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.runtime.concurrency import merged, run_together
from agent_loop.serve.chat_replies import JsonObject, Usage
from agent_loop.serve.chat_requests import CompletionRequest
from agent_loop.serve.completions import (
    CompletionReader,
    ReplyChunk,
    ReplyHead,
    Sampler,
    sample_completion,
)
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


def sample_text(
    request: CompletionRequest, prompts: Sequence[IntArray], *, template: ChatTemplate, sampler: Sampler
) -> AsyncGenerator[ReplyChunk]:
    """Complete each prompt `n` times, and yield the chunks as they are sampled. Closing the iterator aborts them.

    Choice `p * n + i` is the i-th completion of prompt `p`. Sessions are those of `chat_completion`.
    """
    heads = [ReplyHead(prompt) for prompt in prompts for _ in range(request.num_choices)]
    max_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
    return merged(
        sample_completion(
            CompletionReader(
                template,
                head,
                index=index,
                stops=request.stops,
                needs_logprobs=request.wants_logprobs,
            ),
            request.sampling_params(max_tokens=max_tokens, choice=index % request.num_choices),
            sampler=sampler,
            session=None if index else request.session_id,
            is_streamed=request.stream,
        )
        for index, head in enumerate(heads)
    )


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
