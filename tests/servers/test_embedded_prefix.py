"""Tests of the prefix cache: which prompt tokens the embedded engine computes, and which it reuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_loop.types import SamplingParams, TokenOutput
from tests.servers.tiny_embedded import (
    GREEDY,
    full_forward_logprobs,
    generate_all,
    joined,
    random_prompt,
    serving,
    tiny_model,
    wait_until,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def assert_exact(model: Any, prompt: Any, output: TokenOutput) -> None:
    expected = full_forward_logprobs(model, prompt, output.token_ids)
    assert output.log_probs == pytest.approx(expected, abs=1e-4)


async def test_the_second_turn_of_a_session_prefills_only_new_tokens(model: Any) -> None:
    async with serving(model) as server:
        first = random_prompt(40)
        draft = await server.generate(first, GREEDY, "session")
        assert server.stats.prefilled_tokens == 40
        second = joined(first, draft.token_ids, random_prompt(15, seed=1))
        answer = await server.generate(second, GREEDY, "session")
        # The last sampled token was never an input of the model, so it counts as new.
        assert server.stats.prefilled_tokens - 40 == 1 + 15
        assert server.stats.reused_tokens == 40 + len(draft.token_ids) - 1
        assert_exact(model, second, answer)


async def test_the_prompt_of_a_group_is_prefilled_once(model: Any) -> None:
    async with serving(model, prefill_chunk_tokens=32) as server:
        prompt = random_prompt(100)
        params = [SamplingParams(max_tokens=12, seed=i) for i in range(8)]
        outputs = await generate_all(server, [prompt] * 8, params)
        assert server.stats.prefilled_tokens == 100 + 7 * 1
        assert server.stats.reused_tokens == 7 * 99
        assert len({tuple(output.token_ids) for output in outputs}) == 8
        for output in outputs:
            assert_exact(model, prompt, output)


async def test_a_request_that_waits_for_a_prefix_completes_if_the_other_request_is_aborted(
    model: Any,
) -> None:
    async with serving(model, prefill_chunk_tokens=1) as server:
        prompt = random_prompt(150)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(server.generate(prompt, GREEDY, "first"))
            second = group.create_task(server.generate(prompt, GREEDY, "second"))
            await wait_until(server, lambda: server.stats.steps >= 5)
            await server.abort("first")
        assert first.result().stop_reason == "aborted"
        assert_exact(model, prompt, second.result())


async def test_a_new_session_gets_the_slot_of_an_ended_session_before_that_of_a_live_one(model: Any) -> None:
    async with serving(model, max_slots=2) as server:
        prompts = {name: random_prompt(30, seed=i) for i, name in enumerate(("kept", "ended", "new"))}
        kept = await server.generate(prompts["kept"], GREEDY, "kept")
        await server.generate(prompts["ended"], GREEDY, "ended")
        server.end_session("ended")
        await server.generate(prompts["new"], GREEDY, "new")
        assert server.stats.reused_tokens == 0
        await server.generate(joined(prompts["kept"], kept.token_ids, [3]), GREEDY, "kept")
        assert server.stats.reused_tokens == 30 + 20 - 1


async def test_a_session_whose_prompt_changes_reuses_the_common_prefix(model: Any) -> None:
    async with serving(model) as server:
        first = random_prompt(50)
        await server.generate(first, GREEDY, "a")
        changed = joined(first[:35], [101, 102], random_prompt(10, seed=2))
        answer = await server.generate(changed, GREEDY, "a")
        assert server.stats.reused_tokens == 35
        assert_exact(model, changed, answer)
