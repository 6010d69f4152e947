"""`prompt_logprobs` of `/v1/completions`: the log-probs of a prompt's tokens, so that a server can be a teacher."""

from __future__ import annotations

import time
from typing import Annotated, Literal, TypeAlias
from uuid import uuid4

from pydantic import Field

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.requests import CompletionRequest
from agent_loop.completions.response_models import ResponseModel, Usage
from agent_loop.completions.text import prompts_of
from agent_loop.errors import RequestError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.prompt_logprobs import MINUS_INFINITY
from agent_loop.servers.scores import TokenScores, checked_text
from agent_loop.servers.text_scorer import TextScorer
from agent_loop.types import IntArray

PlaceLogProbs: TypeAlias = dict[int, dict[str, float]]


class ServedCompletionRequest(CompletionRequest):
    """Body of `/v1/completions` of `agent-loop serve`."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of sampled tokens; 16 by default. 0 is for `prompt_logprobs` only."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Extension: return the log-probs of the prompt's tokens at temperature 1, and this number of the likeliest tokens
    at each place. Needs `max_tokens` 0."""

    @property
    def is_scored(self) -> bool:
        """Whether the prompt is scored instead of completed.

        Raises:
            RequestError: The request asks for both, or for neither.
        """
        if self.prompt_logprobs is None:
            if self.max_tokens == 0:
                raise RequestError(
                    "max_tokens is 0; give at least 1, or prompt_logprobs to score the prompt",
                    param="max_tokens",
                )
            return False
        if self.max_tokens != 0 or self.stream or self.num_choices != 1:
            raise RequestError(
                "a prompt is scored without a completion; with prompt_logprobs, set max_tokens to 0, and leave out n "
                "and stream",
                param="prompt_logprobs",
            )
        return True


class ScoredPrompt(ResponseModel):
    """Log-probs of one prompt."""

    index: int
    text: str = ""
    finish_reason: Literal["length"] = "length"
    token_ids: list[int] = Field(default_factory=list[int])
    prompt_logprobs: list[PlaceLogProbs | None]
    """Log-probs by token id at each place: those of the prompt's own token and of the likeliest tokens. None for the
    first token, which nothing predicts. -9999 stands for minus infinity."""


class ScoredPrompts(ResponseModel):
    """Response of `/v1/completions` to a request with `prompt_logprobs`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[ScoredPrompt]
    usage: Usage


async def score_prompts(
    request: ServedCompletionRequest,
    *,
    template: ChatTemplate,
    scorer: TextScorer,
    max_model_len: int | None,
) -> ScoredPrompts:
    """Return the log-probs of the tokens of each prompt.

    Args:
        request: A request whose `is_scored` is true.
        template: Chat template of the model. Only its tokenizer is used.
        scorer: Scores the prompts.
        max_model_len: Maximum number of tokens of a prompt; None leaves the check to the servers.

    Raises:
        RequestError: A prompt is empty.
        ServerError: The server refused a prompt or failed.
    """
    num_top = request.prompt_logprobs or 0
    prompts = [
        checked_text(prompt, start=1, top_logprobs=num_top, server="", max_model_len=max_model_len)
        for prompt in prompts_of(request, template=template)
    ]
    scores = await run_together(scorer.score(prompt, top_logprobs=num_top) for prompt in prompts)
    num_tokens = sum(map(len, prompts))
    return ScoredPrompts(
        id=f"cmpl-{uuid4().hex}",
        created=int(time.time()),
        model=request.model,
        choices=[
            ScoredPrompt(index=index, prompt_logprobs=_places(prompt, each))
            for index, (prompt, each) in enumerate(zip(prompts, scores, strict=True))
        ],
        usage=Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens),
    )


def _places(prompt: IntArray, scores: TokenScores) -> list[PlaceLogProbs | None]:
    own = zip(prompt[1:].tolist(), scores.logprobs.clip(MINUS_INFINITY).tolist(), strict=True)
    places = [{token: {"logprob": logprob}} for token, logprob in own]
    if scores.top_ids is not None and scores.top_logprobs is not None:
        likeliest = zip(
            scores.top_ids.tolist(), scores.top_logprobs.clip(MINUS_INFINITY).tolist(), strict=True
        )
        for place, (tokens, logprobs) in zip(places, likeliest, strict=True):
            place |= {token: {"logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)}
    return [None, *places]
