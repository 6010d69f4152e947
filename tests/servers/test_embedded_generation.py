"""Tests of the tokens and log-probs of the embedded engine, compared with plain `transformers`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.servers.embedded.sampling import sample_rows, uniform_at, uniform_stream
from agent_loop.types import IntArray, SamplingParams, TokenOutput
from tests.servers.tiny_embedded import (
    GREEDY,
    full_forward_logprobs,
    generate_all,
    joined,
    random_prompt,
    serving,
    tiny_model,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def plain_greedy(model: Any, prompt: IntArray, *, max_tokens: int = 20) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def one_completion(model: Any, params: SamplingParams, *, prompt: IntArray, **settings: Any) -> TokenOutput:
    async def main() -> TokenOutput:
        async with serving(model, **settings) as server:
            return await server.generate(prompt, params, "only")

    return asyncio.run(main())


def test_greedy_output_equals_that_of_transformers_at_every_concurrency(model: Any) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 36)
    prompts = [random_prompt(int(length), seed=i) for i, length in enumerate(lengths)]
    expected = [plain_greedy(model, prompt) for prompt in prompts]

    async def main(concurrency: int) -> list[list[int]]:
        async with serving(model, prefill_chunk_tokens=64) as server:
            outputs = await generate_all(server, prompts, GREEDY, concurrency=concurrency)
        return [output.token_ids for output in outputs]

    for concurrency in (1, 8, 32):
        assert asyncio.run(main(concurrency)) == expected, f"at concurrency {concurrency}"


async def test_logprobs_equal_those_of_a_full_forward_for_any_mix_of_requests(model: Any) -> None:
    rng = np.random.default_rng(7)
    choices = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.5),
    ]
    params = [
        SamplingParams(
            temperature=choices[i % 5].temperature,
            top_p=choices[i % 5].top_p,
            top_k=choices[i % 5].top_k,
            max_tokens=int(rng.integers(1, 40)),
        )
        for i in range(60)
    ]
    shared = random_prompt(70, seed=99)
    prompts = [
        joined(shared[: rng.integers(0, 70)], random_prompt(int(rng.integers(1, 90)), seed=i))
        for i in range(60)
    ]

    async with serving(model, max_slots=12, prefill_chunk_tokens=48) as server:
        outputs = await generate_all(server, prompts, params)
        second = [
            joined(p, o.token_ids, random_prompt(8, seed=i))
            for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
        ]
        again = await generate_all(server, second, params)
        assert server.stats.reused_tokens > 0
    for prompt, output, param in zip(
        [*prompts, *second], [*outputs, *again], [*params, *params], strict=True
    ):
        assert output.log_probs == pytest.approx(
            full_forward_logprobs(model, prompt, output.token_ids, temperature=param.temperature),
            abs=1e-4,
        )


def test_draws_are_uniform_and_uncorrelated_between_positions_and_seeds() -> None:
    draws = np.array(
        [[uniform_at(uniform_stream(seed), place) for place in range(200)] for seed in range(200)]
    )
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=50)
    assert abs(counts - draws.size / 50).max() < 5 * (draws.size / 50) ** 0.5
    for one, other in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / draws.size**0.5


def test_ignore_eos_ignores_the_models_eos_token_but_not_a_stop_token(model: Any) -> None:
    prompt = random_prompt(12)
    free = one_completion(model, GREEDY, prompt=prompt)
    end, stop = free.token_ids[3], free.token_ids[9]
    ended = one_completion(model, GREEDY, prompt=prompt, eos_token_ids=[end])
    assert ended.stop_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert one_completion(model, params, prompt=prompt, eos_token_ids=[end]).token_ids == free.token_ids
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    stopped = one_completion(model, params, prompt=prompt, eos_token_ids=[end])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_the_models_eos_token_is_the_default(model: Any) -> None:
    prompt = random_prompt(12)
    end = one_completion(model, GREEDY, prompt=prompt).token_ids[0]
    with_end = tiny_model(eos_token_id=end)
    output = one_completion(with_end, GREEDY, prompt=prompt)
    assert (output.token_ids, output.stop_reason) == ([end], "stop")


def test_sampling_frequencies_follow_the_softmax() -> None:
    rng, num_rows = np.random.default_rng(3), 20_000
    logits = torch.from_numpy(rng.normal(size=(1, 12)).astype(np.float32) * 1.5)
    params = [SamplingParams(temperature=0.7)] * num_rows
    rows = sample_rows(logits.expand(num_rows, -1), params=params, uniforms=rng.random(num_rows).tolist())
    counts = np.bincount([row.token_id for row in rows], minlength=12)
    expected = (logits[0].double() / 0.7).softmax(-1).numpy() * num_rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 31.3, "the 0.999 quantile with 11 degrees of freedom"


def test_a_token_of_a_large_vocabulary_is_where_the_cumulative_distribution_passes_the_number() -> None:
    rng, num_rows = np.random.default_rng(5), 3000
    logits = torch.from_numpy(rng.normal(size=(1, 2300)).astype(np.float32) * 3)
    uniforms = np.append(rng.random(num_rows - 2), [0.0, np.nextafter(1, 0)])
    rows = sample_rows(
        logits.expand(num_rows, -1), params=[SamplingParams()] * num_rows, uniforms=uniforms.tolist()
    )
    token_ids = np.array([row.token_id for row in rows])
    ends = logits[0].double().softmax(-1).cumsum(-1).numpy()
    starts = np.append(0.0, ends[:-1])
    assert (starts[token_ids] <= uniforms + 1e-6).all()
    assert (uniforms <= ends[token_ids] + 1e-6).all()


def test_top_k_and_top_p_keep_the_right_tokens_with_the_right_probabilities() -> None:
    rng, num_rows = np.random.default_rng(4), 8000
    probs = torch.tensor([0.05, 0.4, 0.02, 0.3, 0.2, 0.03])
    kept = {
        SamplingParams(top_k=2): [1, 3],
        SamplingParams(top_p=0.65): [1, 3],
        SamplingParams(top_p=0.75): [1, 3, 4],
        SamplingParams(top_k=3, top_p=0.5): [1, 3],
        SamplingParams(top_p=0.01): [1],
        SamplingParams(): [0, 1, 2, 3, 4, 5],
    }
    params = [p for p in kept for _ in range(num_rows)]
    rows = sample_rows(
        probs.log().expand(len(params), -1), params=params, uniforms=rng.random(len(params)).tolist()
    )
    for i, tokens in enumerate(kept.values()):
        got = [row.token_id for row in rows[i * num_rows : (i + 1) * num_rows]]
        shares = np.bincount(got, minlength=6) / num_rows
        expected = np.zeros(6)
        expected[tokens] = probs[tokens] / probs[tokens].sum()
        assert shares == pytest.approx(expected, abs=0.025)
        assert set(got) <= set(tokens)
        assert rows[i * num_rows].logprob == pytest.approx(float(probs.log()[got[0]]), abs=1e-5)


def test_the_extremes_of_the_uniform_number_stay_within_the_candidates() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]]).expand(2, -1)
    rows = sample_rows(logits, params=[SamplingParams()] * 2, uniforms=[0.0, float(np.nextafter(1, 0))])
    assert [row.token_id for row in rows] == [1, 2]
