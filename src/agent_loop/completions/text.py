"""Text completions: a text or token ids in, text and token ids out."""

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
"""Of one request, over all its prompts."""


async def completion(
    request: CompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> TextCompletion:
    """Completes each prompt `n` times; choice `p * n + i` is the i-th of prompt p.

    Args:
        request: `stream` in it is not looked at.
        template: Its tokenizer reads and writes text; messages play no part here.
        sampler: What samples.
        session: The session of the first completion, which the caller ends; the others get one of their own. None
            gives each its own.

    Raises:
        RequestError: The request asks for what is not offered.
        SamplingParamsError: A parameter that the server does not offer.
        ServerError: The server refuses or fails the request.
    """
    job = _Job.prepared(request, template=template, sampler=sampler)
    tally = job.tally()
    choices = await run_together(
        job.choice(index, session=session if index == 0 else None, tally=tally)
        for index in range(job.num_choices)
    )
    return job.reply(choices).model_copy(update={"usage": tally.usage})


async def stream_completion(
    request: CompletionRequest,
    *,
    template: ChatTemplate,
    sampler: Sampler,
    session: str | None = None,
) -> AsyncGenerator[TextCompletion]:
    """As `completion`, in parts, while the model speaks. Leaving the iteration aborts the completions."""
    job = _Job.prepared(request, template=template, sampler=sampler)
    tally = job.tally()
    offsets = [0] * job.num_choices
    begun: set[int] = set()
    sessions = [session, *[None] * (job.num_choices - 1)]
    steps = merged(job.steps(index, session=own, is_streamed=True) for index, own in enumerate(sessions))
    async with aclosing(steps):
        async for index, part in steps:
            tally.add(part)
            shows_tokens = request.return_token_ids or request.wants_logprobs
            if not part.text and part.finish_reason is None and not (shows_tokens and part.token_ids):
                continue
            yield job.reply(
                [job.part_choice(index, part, offset=offsets[index], is_first=index not in begun)]
            )
            begun.add(index)
            offsets[index] += len(part.text)
    if request.stream_options is not None and request.stream_options.include_usage:
        yield job.reply([]).model_copy(update={"usage": tally.usage})


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that is ready to be sampled."""

    request: CompletionRequest
    template: ChatTemplate
    sampler: Sampler
    prompts: Sequence[IntArray]
    id: str
    created: int

    @classmethod
    def prepared(cls, request: CompletionRequest, *, template: ChatTemplate, sampler: Sampler) -> _Job:
        prompts = _prompts_of(request, template=template)
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

    def tally(self) -> UsageCounter:
        return UsageCounter(prompt_tokens=sum(map(len, self.prompts)))

    async def steps(
        self, index: int, *, session: str | None, is_streamed: bool
    ) -> AsyncGenerator[tuple[int, DecodedChunk]]:
        """Samples one of the completions."""
        request = self.request
        prompt, number = divmod(index, request.num_choices)
        params = request.sampling_params(max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS, choice=number)
        with completion_session(self.sampler, session) as request_id:
            wanted = SampleSpec(
                prompt_ids=self.prompts[prompt],
                sampling_params=params,
                request_id=request_id,
                stops=request.stops,
                needs_logprobs=request.wants_logprobs,
            )
            parts = sample_decoded(
                wanted, sampler=self.sampler, template=self.template, is_streamed=is_streamed
            )
            async with aclosing(parts):
                async for part in parts:
                    yield index, part

    async def choice(self, index: int, *, session: str | None, tally: UsageCounter) -> TextCompletionChoice:
        """One of the completions in one piece."""
        parts: list[DecodedChunk] = []
        async with aclosing(self.steps(index, session=session, is_streamed=False)) as steps:
            async for _, part in steps:
                tally.add(part)
                parts.append(part)
        whole = DecodedChunk(
            text="".join(part.text for part in parts),
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[p for part in parts for p in part.logprobs or ()],
            finish_reason=parts[-1].finish_reason,
        )
        return self.part_choice(index, whole, offset=0, is_first=True)

    def part_choice(
        self, index: int, part: DecodedChunk, *, offset: int, is_first: bool
    ) -> TextCompletionChoice:
        shows_ids = bool(self.request.return_token_ids)
        prompt = self.prompts[index // self.request.num_choices]
        return TextCompletionChoice(
            index=index,
            text=part.text,
            finish_reason=cast(Literal["stop", "length"] | None, part.finish_reason),
            logprobs=self._logprobs(part, offset=offset) if self.request.wants_logprobs else None,
            token_ids=part.token_ids if shows_ids else None,
            prompt_token_ids=prompt.tolist() if shows_ids and is_first else None,
        )

    def reply(self, choices: list[TextCompletionChoice]) -> TextCompletion:
        return TextCompletion(id=self.id, created=self.created, model=self.request.model, choices=choices)

    def _logprobs(self, part: DecodedChunk, *, offset: int) -> TextCompletionLogProbs:
        tokens = [self.template.decode([token]) for token in part.token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return TextCompletionLogProbs(
            tokens=tokens, token_logprobs=list(part.logprobs or ()), text_offset=offsets
        )


def _prompts_of(request: CompletionRequest, *, template: ChatTemplate) -> list[IntArray]:
    given: Any = request.prompt
    several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    prompts = [
        as_token_ids(template.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        for prompt in several
    ]
    if any(not len(prompt) for prompt in prompts):
        raise RequestError("prompt is empty; give at least one token", param="prompt")
    return prompts
