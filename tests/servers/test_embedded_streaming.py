"""Tests of streamed completions of the embedded engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from agent_loop.errors import ServerDied
from agent_loop.servers.base import Ability
from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.types import SamplingParams, TokenChunk
from tests.servers.tiny_embedded import (
    GREEDY,
    LONG,
    generate_all,
    random_prompt,
    serving,
    tiny_model,
    wait_until,
    wait_until_decoded,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


async def streamed(
    server: EmbeddedServer, params: SamplingParams, *, seed: int = 0, session: str = "streamed"
) -> list[TokenChunk]:
    prompt = random_prompt(12, seed=seed)
    return [chunk async for chunk in server.stream(prompt, params, session)]


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
