"""The embedded engine against `transformers` on the same device.

Tolerances. In float32, the engine and a plain forward differ in the order of sums alone, which the package bounds by
1e-4 in a log-prob. In bfloat16 both are rounded to 8 bits at every operation, so that neither is the truth: both are
compared with a float32 computation of the same bfloat16 weights, and the engine's mean error may be 1.5 times that of
the plain forward, and more for few tokens; its largest error 3 times. Greedy tokens may differ where the two best
tokens are as close as the rounding.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import torch

from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.types import SamplingParams
from benchmarks.gpu.completions import (
    Completion,
    complete,
    greedy_tokens,
    logprobs_of,
    plain_logprobs,
    random_prompts,
)
from benchmarks.gpu.models import copy_of, random_model, small_config
from benchmarks.gpu.report import Check, StageReport

TOLERANCE = 1e-4
MEAN_FACTOR, LARGEST_FACTOR = 1.5, 3.0
SPREAD = 4.0
"""Added to `MEAN_FACTOR` after division by the square root of the number of tokens, because a mean of few scatters."""
TEMPERATURE = 0.7
CONTEXT = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before its first use, for the last check
    long = device.type == "cuda"
    lengths = [5, 17, 64, 90, 300, 700] * 4 if long else [5, 17, 90]
    num_tokens = 64 if long else 10
    vocabulary = small_config(device).vocab_size
    for name, dtype in DTYPES.items():
        model = random_model(small_config(device), device=device, dtype=dtype)
        for prompts in (
            random_prompts(lengths[-1:], vocabulary=vocabulary),
            random_prompts(lengths, vocabulary=vocabulary, seed=1),
        ):
            with report.check(f"greedy, {name}, batch {len(prompts)}") as check:
                found = asyncio.run(_greedy(model, prompts, num_tokens=num_tokens, check=check))
                compare_tokens(check, model, found)
                compare_logprobs(check, model, found)
        with report.check(f"sampled, second turn, {name}") as check:
            prompts = random_prompts(lengths, vocabulary=vocabulary, seed=2)
            found = asyncio.run(_second_turns(model, prompts, num_tokens=num_tokens))
            cached = min(each.num_cached / len(each.prompt) for each in found)
            check.within("least share of a prompt in the cache", cached, 0.5, 1.0)
            compare_logprobs(check, model, found, temperature=TEMPERATURE)
    with report.check("scores of texts, float32") as check:
        _scores(check, device)
    with report.check("deterministic: alone and in company") as check:
        asyncio.run(_deterministic(check, device, num_tokens=num_tokens))


def serve(model: Any, **settings: Any) -> EmbeddedServer:
    """Return a server of a copy of a model, on the model's device."""
    config = EmbeddedConfig(**{"max_model_len": CONTEXT, "device": model.device.type, **settings})
    return EmbeddedServer(copy_of(model, device=model.device, dtype=model.dtype), config=config)


async def _greedy(model: Any, prompts: list[list[int]], *, num_tokens: int, check: Check) -> list[Completion]:
    server = serve(model)
    try:
        check.require(
            server.cache_kind == "shared", f"the engine fell back to the cache {server.cache_kind!r}"
        )
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return await complete(server, prompts, params)
    finally:
        await server.close()


async def _second_turns(model: Any, prompts: list[list[int]], *, num_tokens: int) -> list[Completion]:
    """Complete a second turn of each session, whose first turn is in the cache."""
    server = serve(model)
    try:
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=num_tokens, ignore_eos=True, seed=3)
        first = await complete(server, prompts, params)
        return await complete(server, [[*each.text, 7, 8, 9] for each in first], params)
    finally:
        await server.close()


def compare_tokens(check: Check, model: Any, found: list[Completion]) -> None:
    """Compare greedy tokens with those of `transformers`, up to the first that is a tie within the rounding."""
    exact = copy_of(model, device=model.device, dtype=torch.float32)
    num_equal = num_tokens = 0
    for each in found:
        expected = greedy_tokens(model, each.prompt, num_tokens=len(each.tokens))
        pairs = list(zip(each.tokens, expected, strict=True))
        first = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
        num_equal, num_tokens = num_equal + first, num_tokens + len(pairs)
        if first == len(pairs):
            continue
        logprobs_V = plain_logprobs(exact, [*each.prompt, *each.tokens[: first + 1]], start=len(each.prompt))[
            -1
        ]
        rounded_V = plain_logprobs(model, [*each.prompt, *each.tokens[: first + 1]], start=len(each.prompt))[
            -1
        ]
        ours, theirs = pairs[first]
        rounding = float((logprobs_V - rounded_V).abs().max())
        gap = float((logprobs_V[ours] - logprobs_V[theirs]).abs())
        allowed = 2 * LARGEST_FACTOR * max(TOLERANCE, rounding)
        check.require(
            gap <= allowed,
            f"token {first} is {ours} instead of {theirs}, with {gap:.3g} between their log-probs, which is more "
            f"than the rounding ({allowed:.3g})",
        )
    check.figure("equal to the first tie", 100 * num_equal / num_tokens, "%")


def compare_logprobs(check: Check, model: Any, found: list[Completion], *, temperature: float = 1.0) -> None:
    """Compare the log-probs of an engine with those of plain forwards over the same tokens."""
    exact = copy_of(model, device=model.device, dtype=torch.float32)

    def errors(reference: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the errors of the engine and of the plain forward in the model's dtype."""
        ours: list[torch.Tensor] = []
        plain: list[torch.Tensor] = []
        for each in found:
            options = {"start": len(each.prompt), "temperature": temperature}
            expected = logprobs_of(plain_logprobs(reference, each.text, **options), each.tokens)
            ours.append((each.logprobs - expected).abs())
            plain.append(
                (logprobs_of(plain_logprobs(model, each.text, **options), each.tokens) - expected).abs()
            )
        return torch.cat(ours), torch.cat(plain)

    ours, plain = errors(exact)
    if model.dtype == torch.float32:
        check.at_most("largest error", float(ours.max()), TOLERANCE)
        return
    limit = MEAN_FACTOR + SPREAD / len(ours) ** 0.5
    check.at_most("mean error to plain's", float(ours.mean() / plain.mean()), limit)
    check.at_most("largest error", float(ours.max()), LARGEST_FACTOR * float(plain.max()))


def _scores(check: Check, device: torch.device) -> None:
    model = random_model(small_config(device), device=device)
    [text] = random_prompts([600], vocabulary=model.config.vocab_size)

    async def score() -> np.ndarray:
        server = serve(model)
        try:
            return np.asarray((await server.score(np.asarray(text, dtype=np.int32), start=1)).logprobs)
        finally:
            await server.close()

    expected = logprobs_of(plain_logprobs(model, text, start=1), text[1:])
    found = torch.from_numpy(asyncio.run(score()).astype(np.float64))
    check.at_most("largest error", float((found - expected).abs().max()), TOLERANCE)


async def _deterministic(check: Check, device: torch.device, *, num_tokens: int) -> None:
    """Compare a completion alone with the same in company, to the last bit. Changes the kernels of the process."""
    model = random_model(small_config(device), device=device)
    server = serve(model, deterministic=True)
    prompts = random_prompts([40, 9, 23, 61], vocabulary=model.config.vocab_size, seed=4)
    params = SamplingParams(temperature=1, max_tokens=num_tokens, ignore_eos=True, seed=5)
    try:
        [alone] = await complete(server, prompts[:1], params, session="alone")
        together = await complete(server, prompts, params, session="together")
    finally:
        await server.close()
        torch.use_deterministic_algorithms(False)
    check.require(alone.tokens == together[0].tokens, "other requests changed the tokens")
    check.require(torch.equal(alone.logprobs, together[0].logprobs), "other requests changed the log-probs")
    check.figure("tokens", len(alone.tokens))
