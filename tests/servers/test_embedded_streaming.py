"""Tests of streamed completions of the embedded engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from agent_loop.errors import BadPrompt, ServerDied, ServerError
from agent_loop.servers.base import Ability
from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput
from tests.servers.tiny_embedded import (
    GREEDY,
    LONG,
    generate_all,
    random_prompt,
    serving,
    tiny_model,
    wait_until,
    wait_until_decoded,
    weights_of,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


async def streamed(
    server: EmbeddedServer, params: SamplingParams, *, seed: int = 0, session: str = "streamed"
) -> list[TokenChunk]:
    prompt = random_prompt(12, seed=seed)
    return [chunk async for chunk in server.stream(prompt, params, session)]


def test_the_streamed_chunks_joined_equal_the_result_of_generate(model: Any) -> None:
    async def scenario() -> None:
        async with serving(model, eos_token_ids=[7]) as server:
            for seed, params in enumerate(
                [
                    GREEDY,
                    SamplingParams(seed=3, max_tokens=30),
                    SamplingParams(seed=4, max_tokens=1),
                    SamplingParams(seed=5, temperature=0.7, top_p=0.9, top_k=20, max_tokens=60),
                ]
            ):
                whole = await server.generate(random_prompt(12, seed=seed), params, "whole")
                parts = await streamed(server, params, seed=seed)
                joined = TokenOutput.from_chunks(parts)
                assert joined.token_ids == whole.token_ids
                assert joined.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
                assert (joined.stop_reason, joined.weight_version) == (
                    whole.stop_reason,
                    whole.weight_version,
                )
                assert len(parts) == len(whole.token_ids), "one chunk per step"

    asyncio.run(scenario())


def test_chunks_arrive_while_the_completion_and_others_run(model: Any) -> None:
    async def scenario() -> None:
        async with serving(model) as server:
            assert Ability.STREAMING in server.abilities
            async with aclosing(server.stream(random_prompt(5), LONG, "a")) as parts:
                first = await anext(parts)
                assert first.stop_reason is None
                assert (await server.health()).num_running == 1
                others = await generate_all(
                    server, [random_prompt(9, seed=n) for n in range(3)], GREEDY, prefix="b"
                )
                assert [len(other.token_ids) for other in others] == [20] * 3
                rest = [part async for part in parts]
            assert sum(len(part.token_ids) for part in [first, *rest]) == 200
            assert rest[-1].stop_reason == "length"

    asyncio.run(scenario())


def test_closing_the_iterator_frees_the_slot(model: Any) -> None:
    async def scenario() -> None:
        async with serving(model, max_slots=1) as server:
            async with aclosing(server.stream(random_prompt(5), LONG, "left")) as parts:
                await anext(parts)
            await server.abort("unknown session")
            assert (await server.health()).num_running == 0
            assert server.stats.decoded_tokens < 200
            task = asyncio.ensure_future(streamed(server, LONG))
            await wait_until_decoded(server, server.stats.decoded_tokens + 3)
            task.cancel()
            await asyncio.wait({task})
            await wait_until(server, lambda: not server._engine.num_running)
            assert (await server.generate(random_prompt(3), GREEDY, "next")).stop_reason == "length"

    asyncio.run(scenario())


def test_an_aborted_stream_ends_with_the_stop_reason_aborted(model: Any) -> None:
    async def scenario() -> None:
        async with serving(model, max_slots=1) as server:
            task = asyncio.ensure_future(streamed(server, LONG, session="running"))
            waiting = asyncio.ensure_future(streamed(server, LONG, session="waiting"))
            await wait_until_decoded(server, 3)
            await server.abort("waiting")
            assert await waiting == [TokenChunk([], [], stop_reason="aborted", num_cached_tokens=0)]
            await server.abort("running")
            parts = await task
            assert parts[-1].stop_reason == "aborted"
            assert 3 <= len(TokenOutput.from_chunks(parts).token_ids) < 200

    asyncio.run(scenario())


def test_each_chunk_of_a_stream_across_a_weight_update_has_its_weight_version(model: Any) -> None:
    async def scenario() -> None:
        async with serving(model) as server:
            task = asyncio.ensure_future(streamed(server, LONG))
            await wait_until_decoded(server, 5)
            await server.update_weights(weights_of(model).items(), weight_version=9)
            joined = TokenOutput.from_chunks(await task)
            assert [chunk.weight_version for chunk in joined.chunks] == [0, 9]
            assert joined.weight_version == 9
            assert len(joined.token_ids) == 200

    asyncio.run(scenario())


def test_an_invalid_streamed_request_fails_before_its_first_chunk(model: Any) -> None:
    async def scenario() -> None:
        async with serving(model, max_model_len=32) as server:
            with pytest.raises(BadPrompt, match="40 tokens"):
                await anext(server.stream(random_prompt(40), GREEDY, "long"))
            await server.sleep()
            with pytest.raises(ServerError, match="asleep"):
                await streamed(server, GREEDY)
            await server.wake_up()
            assert len(await streamed(server, GREEDY)) == 20

    asyncio.run(scenario())


def test_closing_the_server_fails_its_streams(model: Any) -> None:
    async def scenario() -> None:
        async with serving(model) as server:
            parts = server.stream(random_prompt(5), LONG, "cut")
            await anext(parts)
            await server.close()
            with pytest.raises(ServerDied, match="closed"):
                async for _ in parts:
                    pass
            with pytest.raises(ServerDied):
                await anext(server.stream(random_prompt(5), LONG, "late"))

    asyncio.run(scenario())
