"""Tests of the completions of the embedded engine: compared with plain `transformers`, and of the prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import MistralConfig

from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.servers.embedded.sampling import sample_rows, uniform_at, uniform_stream
from agent_loop.types import IntArray, SamplingParams, TokenOutput
from tests.servers.tiny_embedded import (
    GREEDY,
    SIZES,
    assert_exact,
    build,
    generate_all,
    joined,
    random_prompt,
    serving,
    shared_model,
    tiny_model,
    wait_until,
)


def plain_greedy(prompt: IntArray, *, max_tokens: int = 20) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    mask = torch.ones_like(ids)
    out = shared_model().generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


async def test_greedy_output_equals_that_of_transformers_at_every_concurrency() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 36)
    prompts = [random_prompt(int(length), seed=i) for i, length in enumerate(lengths)]
    expected = [plain_greedy(prompt) for prompt in prompts]
    for concurrency in (1, 8, 32):
        async with serving(prefill_chunk_tokens=64) as server:
            outputs = await generate_all(server, prompts, GREEDY, concurrency=concurrency)
        assert [output.token_ids for output in outputs] == expected, f"at concurrency {concurrency}"


async def test_logprobs_equal_those_of_a_full_forward_for_any_mix_of_requests() -> None:
    rng = np.random.default_rng(7)
    choices = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.5),
    ]
    params = [structs.replace(choices[i % 5], max_tokens=int(rng.integers(1, 40))) for i in range(60)]
    shared = random_prompt(70, seed=99)
    prompts = [
        joined(shared[: rng.integers(0, 70)], random_prompt(int(rng.integers(1, 90)), seed=i))
        for i in range(60)
    ]
    async with serving(max_slots=12, prefill_chunk_tokens=48) as server:
        outputs = await generate_all(server, prompts, params)
        second = [
            joined(p, o.token_ids, random_prompt(8, seed=i))
            for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
        ]
        again = await generate_all(server, second, params)
        assert server.stats.reused_tokens > 0
    for prompt, output, param in zip([*prompts, *second], [*outputs, *again], params * 2, strict=True):
        assert_exact(prompt, output, temperature=param.temperature)


async def test_ignore_eos_ignores_the_models_eos_token_but_not_a_stop_token() -> None:
    prompt = random_prompt(12)

    async def complete(model: Any = None, *, ends: list[int] | None = None, **params: Any) -> TokenOutput:
        async with serving(model, eos_token_ids=ends) as server:
            return await server.generate(prompt, structs.replace(GREEDY, **params), "only")

    free = (await complete()).token_ids
    end, stop = free[3], free[9]
    ended = await complete(ends=[end])
    assert (ended.stop_reason, ended.token_ids) == ("stop", free[: free.index(end) + 1])
    assert (await complete(ends=[end], ignore_eos=True)).token_ids == free
    stopped = await complete(ends=[end], ignore_eos=True, stop_token_ids=(stop,))
    assert stopped.token_ids == free[: free.index(stop) + 1]
    by_default = await complete(tiny_model(eos_token_id=free[0]))
    assert (by_default.token_ids, by_default.stop_reason) == (free[:1], "stop")


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_draws_are_uniform_and_uncorrelated_between_positions_and_seeds() -> None:
    draws = np.array(
        [[uniform_at(uniform_stream(seed), place) for place in range(200)] for seed in range(200)]
    )
    assert 0 <= draws.min() <= draws.max() < 1
    counts, _ = np.histogram(draws, bins=50)
    assert abs(counts - draws.size / 50).max() < 5 * (draws.size / 50) ** 0.5
    for one, other in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / draws.size**0.5


def sample(logits: torch.Tensor, params: SamplingParams, uniforms: Any) -> list[Any]:
    """Sample one token of the same logits for each uniform number."""
    num_rows = len(uniforms)
    return sample_rows(logits.expand(num_rows, -1), params=[params] * num_rows, uniforms=list(uniforms))


def test_sampling_frequencies_follow_the_softmax() -> None:
    rng, num_rows = np.random.default_rng(3), 20_000
    logits = torch.from_numpy(rng.normal(size=(1, 12)).astype(np.float32) * 1.5)
    rows = sample(logits, SamplingParams(temperature=0.7), rng.random(num_rows).tolist())
    counts = np.bincount([row.token_id for row in rows], minlength=12)
    expected = (logits[0].double() / 0.7).softmax(-1).numpy() * num_rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 31.3, "the 0.999 quantile with 11 degrees of freedom"


def test_a_token_of_a_large_vocabulary_is_where_the_cumulative_distribution_passes_the_number() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(1, 2300)).astype(np.float32) * 3)
    uniforms = np.append(rng.random(2998), [0.0, np.nextafter(1, 0)])
    token_ids = np.array([row.token_id for row in sample(logits, SamplingParams(), uniforms.tolist())])
    ends = logits[0].double().softmax(-1).cumsum(-1).numpy()
    starts = np.append(0.0, ends[:-1])
    assert (starts[token_ids] <= uniforms + 1e-6).all()
    assert (uniforms <= ends[token_ids] + 1e-6).all()


PROBS = torch.tensor([0.05, 0.4, 0.02, 0.3, 0.2, 0.03])


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (SamplingParams(top_k=2), [1, 3]),
        (SamplingParams(top_p=0.65), [1, 3]),
        (SamplingParams(top_p=0.75), [1, 3, 4]),
        (SamplingParams(top_k=3, top_p=0.5), [1, 3]),
        (SamplingParams(top_p=0.01), [1]),
        (SamplingParams(min_p=0.4), [1, 3, 4]),
        (SamplingParams(min_p=0.6), [1, 3]),
        (SamplingParams(), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_top_k_top_p_and_min_p_keep_the_right_tokens_with_the_right_probabilities(
    params: SamplingParams, tokens: list[int]
) -> None:
    num_rows = 8000
    rows = sample(PROBS.log(), params, np.random.default_rng(4).random(num_rows).tolist())
    got = [row.token_id for row in rows]
    expected = np.zeros(6)
    expected[tokens] = PROBS[tokens] / PROBS[tokens].sum()
    assert np.bincount(got, minlength=6) / num_rows == pytest.approx(expected, abs=0.025)
    assert set(got) <= set(tokens)
    assert rows[0].logprob == pytest.approx(float(PROBS.log()[got[0]]), abs=1e-5)


def test_the_extremes_of_the_uniform_number_stay_within_the_candidates() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    rows = sample(logits, SamplingParams(), [0.0, float(np.nextafter(1, 0))])
    assert [row.token_id for row in rows] == [1, 2]


# -- the prefix cache --------------------------------------------------------------------------------------------------


async def test_the_second_turn_of_a_session_prefills_only_new_tokens() -> None:
    async with serving() as server:
        first = random_prompt(40)
        draft = await server.generate(first, GREEDY, "session")
        assert server.stats.prefilled_tokens == 40
        second = joined(first, draft.token_ids, random_prompt(15, seed=1))
        answer = await server.generate(second, GREEDY, "session")
        # The last sampled token was never an input of the model, so it counts as new.
        assert server.stats.prefilled_tokens - 40 == 1 + 15
        assert server.stats.reused_tokens == 40 + len(draft.token_ids) - 1
        assert_exact(second, answer)


async def test_the_prompt_of_a_group_is_prefilled_once() -> None:
    async with serving(prefill_chunk_tokens=32) as server:
        prompt = random_prompt(100)
        params = [SamplingParams(max_tokens=12, seed=i) for i in range(8)]
        outputs = await generate_all(server, [prompt] * 8, params)
        assert server.stats.prefilled_tokens == 100 + 7 * 1
        assert server.stats.reused_tokens == 7 * 99
    assert len({tuple(output.token_ids) for output in outputs}) == 8
    for output in outputs:
        assert_exact(prompt, output)


async def test_a_request_that_waits_for_a_prefix_completes_if_the_other_request_is_aborted() -> None:
    async with serving(prefill_chunk_tokens=1) as server, asyncio.TaskGroup() as group:
        prompt = random_prompt(150)
        first = group.create_task(server.generate(prompt, GREEDY, "first"))
        second = group.create_task(server.generate(prompt, GREEDY, "second"))
        await wait_until(server, lambda: server.stats.steps >= 5)
        await server.abort("first")
        assert (await first).stop_reason == "aborted"
        assert_exact(prompt, await second)


async def test_a_new_session_gets_the_slot_of_an_ended_session_before_that_of_a_live_one() -> None:
    async with serving(max_slots=2) as server:
        prompts = {name: random_prompt(30, seed=i) for i, name in enumerate(("kept", "ended", "new"))}
        kept = await server.generate(prompts["kept"], GREEDY, "kept")
        await server.generate(prompts["ended"], GREEDY, "ended")
        server.end_session("ended")
        await server.generate(prompts["new"], GREEDY, "new")
        assert server.stats.reused_tokens == 0
        await server.generate(joined(prompts["kept"], kept.token_ids, [3]), GREEDY, "kept")
        assert server.stats.reused_tokens == 30 + 20 - 1


async def test_a_session_whose_prompt_changes_reuses_the_common_prefix() -> None:
    async with serving() as server:
        first = random_prompt(50)
        await server.generate(first, GREEDY, "a")
        changed = joined(first[:35], [101, 102], random_prompt(10, seed=2))
        answer = await server.generate(changed, GREEDY, "a")
        assert server.stats.reused_tokens == 35
        assert_exact(changed, answer)


# -- deterministic engines ---------------------------------------------------------------------------------------------

PROMPTS = [random_prompt(5 + 11 * n, seed=n) for n in range(6)]
PARAMS = [
    SamplingParams(max_tokens=24, seed=1),
    SamplingParams(max_tokens=9, seed=2, temperature=0.7),
    SamplingParams(max_tokens=24, seed=3, top_p=0.8),
    SamplingParams(max_tokens=17, temperature=0),
    SamplingParams(max_tokens=24, seed=4, top_k=20, temperature=1.3),
    SamplingParams(max_tokens=3, seed=5),
]


@pytest.fixture(params=["full", "window", "no_cache"])
def deterministic(request: pytest.FixtureRequest) -> Any:
    """Return a function that starts a deterministic server."""
    model = build(MistralConfig(**SIZES, sliding_window=16)) if request.param == "window" else None
    settings = {"cache": "none"} if request.param == "no_cache" else {}
    return lambda: serving(model, deterministic=True, **settings)


@pytest.mark.nightly(keep=1)
async def test_concurrent_requests_change_no_bit_of_a_completion(deterministic: Any) -> None:
    found: list[dict[int, Any]] = []
    for order, concurrency in (([0, 1, 2, 3, 4, 5], 1), ([4, 0, 5, 3, 1, 2], 6), ([5, 4, 3, 2, 1, 0], 2)):
        prompts, params = [PROMPTS[n] for n in order], [PARAMS[n] for n in order]
        async with deterministic() as server:
            outputs = await generate_all(server, prompts, params, concurrency=concurrency)
        found.append({n: (o.token_ids, o.log_probs) for n, o in zip(order, outputs, strict=True)})
    assert found[0] == found[1] == found[2]


@pytest.mark.nightly(keep=1)
async def test_a_resumed_completion_equals_the_uninterrupted_one_to_the_last_bit(deterministic: Any) -> None:
    async with deterministic() as server:
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            whole = await server.generate(prompt, params, "whole")
            for kept in (1, 2, len(whole.token_ids) - 1):
                context = joined(prompt, whole.token_ids[:kept])
                rest = await server.generate(context, params.after(kept), f"rest after {kept}")
                assert whole.token_ids[kept:] == rest.token_ids
                assert (whole.log_probs or [])[kept:] == rest.log_probs


async def test_a_turn_does_not_depend_on_which_server_computed_the_turn_before(deterministic: Any) -> None:
    context, params = PROMPTS[3], SamplingParams(max_tokens=20, seed=7)

    async def second_turn(server: EmbeddedServer) -> Any:
        output = await server.generate(context, params, "s")
        return output.token_ids, output.log_probs

    async with deterministic() as first, deterministic() as second:
        await first.generate(context[:20], SamplingParams(max_tokens=1, temperature=0), "s")
        assert await second_turn(first) == await second_turn(second)
