"""Completions of an embedded server, and the same tokens computed by a plain forward of `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.types import SamplingParams, TokenOutput


@dataclass(frozen=True, slots=True)
class Completion:
    """Prompt, sampled tokens, and their log-probs as the server returned them."""

    prompt: list[int]
    tokens: list[int]
    logprobs: Tensor
    num_cached: int

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.tokens]


def random_prompts(lengths: Sequence[int], *, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens."""
    generator = np.random.default_rng(seed)
    return [[int(token) for token in generator.integers(1, vocabulary, length)] for length in lengths]


async def complete(
    server: EmbeddedServer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    session: str = "session",
) -> list[Completion]:
    """Complete all prompts at once. Prompt number N belongs to session number N."""

    async def one(number: int) -> TokenOutput:
        ids = np.asarray(prompts[number], dtype=np.int32)
        return await server.generate(ids, params, f"{session}-{number}")

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(len(prompts))]
    outputs = [task.result() for task in tasks]
    return [
        Completion(
            list(prompt),
            list(output.token_ids),
            torch.tensor(list(output.log_probs or []), dtype=torch.float64),
            int(output.num_cached_tokens or 0),
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@torch.no_grad()
def plain_logprobs(model: Any, text: Sequence[int], *, start: int, temperature: float = 1.0) -> Tensor:
    """Return the log-probs of the whole vocabulary before each token from `start` on, [tokens, vocab] float64 on the
    CPU, by one forward without a cache."""
    ids = torch.tensor([list(text[:-1])], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 :]
    return (logits.double().cpu() / temperature).log_softmax(dim=-1)


def logprobs_of(logprobs_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the log-prob of each token, [T]."""
    return logprobs_TV.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]


@torch.no_grad()
def greedy_tokens(model: Any, prompt: Sequence[int], *, num_tokens: int) -> list[int]:
    """Return the greedy completion that `transformers` generates."""
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found
