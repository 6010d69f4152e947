"""Tests that a deterministic engine gives the same completion to the last bit, regardless of other requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers import MistralConfig

from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.types import SamplingParams, TokenOutput
from tests.servers.tiny_embedded import (
    SIZES,
    build,
    generate_all,
    joined,
    random_prompt,
    serving,
    tiny_model,
)

PROMPTS = [random_prompt(5 + 11 * n, seed=n) for n in range(6)]
PARAMS = [
    SamplingParams(max_tokens=24, seed=1),
    SamplingParams(max_tokens=9, seed=2, temperature=0.7),
    SamplingParams(max_tokens=24, seed=3, top_p=0.8),
    SamplingParams(max_tokens=17, temperature=0),
    SamplingParams(max_tokens=24, seed=4, top_k=20, temperature=1.3),
    SamplingParams(max_tokens=3, seed=5),
]


@pytest.fixture(scope="module", params=["full", "window", "no_cache"])
def setup(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    """Return a model and the settings of its server."""
    settings: dict[str, Any] = {"deterministic": True}
    if request.param == "window":
        return build(MistralConfig(**SIZES, sliding_window=16)), settings
    return tiny_model(), settings | ({"cache": "none"} if request.param == "no_cache" else {})


def completions(
    setup: tuple[Any, dict[str, Any]], *, order: list[int], concurrency: int
) -> list[TokenOutput]:
    model, settings = setup

    async def main() -> list[TokenOutput]:
        async with serving(model, **settings) as server:
            outputs = await generate_all(
                server, [PROMPTS[n] for n in order], [PARAMS[n] for n in order], concurrency=concurrency
            )
            return [
                output for _, output in sorted(zip(order, outputs, strict=True), key=lambda pair: pair[0])
            ]

    return asyncio.run(main())


@pytest.mark.nightly(keep=1)
def test_concurrent_requests_change_no_bit_of_a_completion(setup: tuple[Any, dict[str, Any]]) -> None:
    alone = completions(setup, order=[0, 1, 2, 3, 4, 5], concurrency=1)
    together = completions(setup, order=[4, 0, 5, 3, 1, 2], concurrency=6)
    in_pairs = completions(setup, order=[5, 4, 3, 2, 1, 0], concurrency=2)
    assert [(o.token_ids, o.log_probs) for o in alone] == [(o.token_ids, o.log_probs) for o in together]
    assert [(o.token_ids, o.log_probs) for o in alone] == [(o.token_ids, o.log_probs) for o in in_pairs]


@pytest.mark.nightly(keep=1)
async def test_a_resumed_completion_equals_the_uninterrupted_one_to_the_last_bit(
    setup: tuple[Any, dict[str, Any]],
) -> None:
    model, settings = setup

    async with serving(model, **settings) as server:
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            whole = await server.generate(prompt, params, "whole")
            for kept in (1, 2, len(whole.token_ids) - 1):
                context = joined(prompt, whole.token_ids[:kept])
                rest = await server.generate(context, params.after(kept), f"rest after {kept}")
                assert whole.token_ids[kept:] == rest.token_ids
                assert (whole.log_probs or [])[kept:] == rest.log_probs


async def test_a_turn_does_not_depend_on_which_server_computed_the_turn_before(
    setup: tuple[Any, dict[str, Any]],
) -> None:
    model, settings = setup

    async def second_turn(server: EmbeddedServer, *, has_first: bool) -> TokenOutput:
        context = PROMPTS[3]
        if has_first:
            await server.generate(context[:20], SamplingParams(max_tokens=1, temperature=0), "s")
        return await server.generate(context, SamplingParams(max_tokens=20, seed=7), "s")

    async with serving(model, **settings) as first_server, serving(model, **settings) as second_server:
        one = await second_turn(first_server, has_first=True)
        other = await second_turn(second_server, has_first=False)
        assert (one.token_ids, one.log_probs) == (other.token_ids, other.log_probs)
