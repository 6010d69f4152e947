"""A sampler that checks prompts and counts tokens for an HTTP application."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from agent_loop.completions.sampling import Sampler
from agent_loop.errors import BadPrompt
from agent_loop.serving.metrics import Metrics
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput


class MeteredSampler:
    """`Sampler` that refuses prompts which are too long, and updates metrics."""

    def __init__(self, sampler: Sampler, *, metrics: Metrics, max_model_len: int | None) -> None:
        self._sampler = sampler
        self._metrics = metrics
        self._max_model_len = max_model_len

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        self._check(prompt_ids)
        output = await self._sampler.generate(
            prompt_ids, sampling_params, request_id, attachments=attachments
        )
        self._metrics.prompt_tokens.inc(len(prompt_ids))
        self._metrics.completion_tokens.inc(len(output.token_ids))
        return output

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        self._check(prompt_ids)
        started = time.perf_counter()
        has_first_chunk = False
        chunks = self._sampler.stream(prompt_ids, sampling_params, request_id, attachments=attachments)
        async with aclosing(chunks):
            async for chunk in chunks:
                if not has_first_chunk:
                    self._metrics.prompt_tokens.inc(len(prompt_ids))
                    self._metrics.first_token.observe(time.perf_counter() - started)
                    has_first_chunk = True
                self._metrics.completion_tokens.inc(len(chunk.token_ids))
                yield chunk

    def end_session(self, request_id: str) -> None:
        self._sampler.end_session(request_id)

    def _check(self, prompt_ids: IntArray) -> None:
        longest = self._max_model_len
        if longest is not None and len(prompt_ids) >= longest:
            raise BadPrompt(
                f"the prompt has {len(prompt_ids)} tokens, but the limit is {longest - 1}, because the context of "
                f"{longest} tokens must have room for a sampled token; shorten the prompt"
            )
