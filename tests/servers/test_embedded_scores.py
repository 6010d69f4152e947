"""Tests of the scores of the embedded engine, compared with plain `transformers`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, MistralConfig

from agent_loop.errors import ServerError
from agent_loop.types import IntArray, TokenOutput
from tests.servers.tiny_embedded import (
    GREEDY,
    LONG,
    SIZES,
    VOCAB_SIZE,
    build,
    joined,
    random_prompt,
    serving,
    shared_model,
    tiny_model,
    wait_until,
    wait_until_decoded,
    weights_of,
)

TOLERANCE = 1e-4
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shared": (tiny_model, {"cache": "shared"}),
    "per_request": (tiny_model, {"cache": "per_request"}),
    "none": (tiny_model, {"cache": "none"}),
    "deterministic": (tiny_model, {"deterministic": True}),
    "sliding_window": (lambda: build(MistralConfig(**SIZES, sliding_window=16)), {}),
    "gpt2": (lambda: build(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4)), {}),
}


def plain_logprobs(model: Any, text: IntArray) -> torch.Tensor:
    """Return the log-probs of the whole vocabulary before each token but the first, [num_tokens - 1, vocab]."""
    ids = torch.from_numpy(text.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1)


def expected_scores(model: Any, text: IntArray, *, start: int = 1) -> np.ndarray[Any, Any]:
    targets = torch.from_numpy(text[1:].astype(np.int64))[:, None]
    return plain_logprobs(model, text).gather(1, targets)[start - 1 :, 0].numpy()


@pytest.mark.parametrize("name", MODELS)
async def test_scores_equal_those_of_transformers_with_each_cache(name: str) -> None:
    make, settings = MODELS[name]
    model = make()
    texts = [random_prompt(length, seed=length) for length in (2, 3, 9, 33, 40, 150, 7, 7)]
    starts = [1, 2, 4, 1, 39, 100, 7, 6]
    async with serving(model, prefill_chunk_tokens=32, **settings) as server, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(server.score(text, start=start, top_logprobs=3))
            for text, start in zip(texts, starts, strict=True)
        ]
        found = [await task for task in tasks]
    for text, start, scores in zip(texts, starts, found, strict=True):
        assert scores.logprobs.shape == (len(text) - start,)
        expected = expected_scores(model, text, start=start)
        np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE, rtol=0)
        values, ids = plain_logprobs(model, text)[start - 1 :].topk(3)
        assert scores.top_logprobs is not None
        np.testing.assert_array_equal(np.asarray(scores.top_ids), ids)
        np.testing.assert_allclose(scores.top_logprobs, values, atol=TOLERANCE, rtol=0)


async def test_the_whole_vocabulary_gives_the_full_distribution() -> None:
    text = random_prompt(20)
    async with serving() as server:
        scores = await server.score(text, start=5, top_logprobs=2 * VOCAB_SIZE)
    top_ids, top_logprobs = np.asarray(scores.top_ids), np.asarray(scores.top_logprobs)
    assert (np.sort(top_ids, axis=1) == np.arange(VOCAB_SIZE)).all()
    np.testing.assert_allclose(np.exp(top_logprobs).sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(top_logprobs[top_ids == text[5:, None]], scores.logprobs)


async def test_a_completion_samples_tokens_between_the_chunks_of_a_long_text() -> None:
    async with serving(prefill_chunk_tokens=1) as server, asyncio.TaskGroup() as group:
        running = group.create_task(server.generate(random_prompt(9), LONG, "a"))
        await wait_until_decoded(server, 1)
        scoring = group.create_task(server.score(random_prompt(256)))
        await wait_until(server, lambda: server.stats.scored_tokens >= 1)
        before, scored = server.stats.decoded_tokens, server.stats.scored_tokens
        await wait_until_decoded(server, before + 50)
        assert not scoring.done()
        assert server.stats.scored_tokens - scored <= 60, "one chunk for each sampled token"
        assert (await running).stop_reason == "length"


async def test_scores_do_not_change_completions_or_take_the_cache_of_sessions() -> None:
    found: list[list[TokenOutput]] = []
    for has_scores in (False, True):
        async with serving(max_slots=1) as server:
            first = await server.generate(random_prompt(40), GREEDY, "a")
            if has_scores:
                await server.score(random_prompt(100))
            context = joined(random_prompt(40), first.token_ids, [3])
            found.append([first, await server.generate(context, GREEDY, "a")])
    plain, beside = found
    assert plain == beside
    assert beside[1].num_cached_tokens == 59


async def test_a_score_that_runs_during_a_weight_update_is_computed_with_the_new_weights_alone() -> None:
    other = tiny_model(seed=1)
    async with serving(prefill_chunk_tokens=1) as server, asyncio.TaskGroup() as group:
        scoring = group.create_task(server.score(random_prompt(200)))
        await wait_until(server, lambda: server.stats.scored_tokens >= 3)
        await server.update_weights(weights_of(other).items(), weight_version=1)
        assert not scoring.done()
        scores = await scoring
    expected = expected_scores(other, random_prompt(200))
    np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE, rtol=0)


async def test_a_sleeping_or_closed_server_and_broken_weights_are_errors() -> None:
    async with serving() as server:
        await server.sleep()
        with pytest.raises(ServerError, match="asleep"):
            await server.score(random_prompt(5))
        await server.wake_up()
        broken = {
            name: torch.full_like(value, torch.nan) for name, value in weights_of(shared_model()).items()
        }
        await server.update_weights(broken.items(), weight_version=1)
        with pytest.raises(ServerError, match="logits are NaN"):
            await server.score(random_prompt(5))
        await server.close()
        with pytest.raises(ServerError, match="closed"):
            await server.score(random_prompt(5))


async def test_cancelling_a_score_frees_the_engine() -> None:
    async with serving(prefill_chunk_tokens=1) as server:
        task = asyncio.create_task(server.score(random_prompt(256)))
        await wait_until(server, lambda: server.stats.scored_tokens >= 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await server.score(random_prompt(5))).logprobs) == 4
        assert server.stats.scored_tokens < 200
        assert (await server.health()).num_waiting == 0
