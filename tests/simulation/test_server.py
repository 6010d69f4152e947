"""Tests of the simulated server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agent_loop.errors import BadPrompt, ServerDied, ServerError
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.simulation.engine import EngineModel
from agent_loop.simulation.server import SimulatedServer
from agent_loop.testing import run_virtual
from agent_loop.types import IntArray, SamplingParams, TokenOutput, as_token_ids

MODEL = EngineModel(step_s=1.0, step_s_per_request=0.0, prefill_tokens_per_s=1e9, kv_tokens=10_000)


def count_up(prompt_ids: IntArray, session: str) -> Sequence[int]:
    last = int(prompt_ids[-1])
    return range(last + 1, 110)


def server_named(name: str) -> SimulatedServer:
    return SimulatedServer(count_up, model=MODEL, name=name)


async def complete(server: SimulatedServer, session: str = "s", *, first: int = 99) -> TokenOutput:
    return await server.generate(as_token_ids([first]), SamplingParams(), session)


def test_a_completion_is_returned_when_the_engine_has_finished_it() -> None:
    async def main() -> None:
        server = server_named("a")
        output = await complete(server)
        assert output.token_ids == list(range(100, 110))
        assert asyncio.get_running_loop().time() == pytest.approx(10)
        assert (server.num_running, server.engine.num_running) == (0, 0)

    run_virtual(main())


def test_an_aborted_completion_returns_its_tokens() -> None:
    async def main() -> None:
        server = server_named("a")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(complete(server))
            await asyncio.sleep(4.5)
            await server.abort("s")
        assert (task.result().token_ids, task.result().stop_reason) == ([100, 101, 102, 103], "aborted")
        assert server.engine.num_running == 0

    run_virtual(main())


def test_a_cancelled_completion_frees_its_slot() -> None:
    async def main() -> None:
        server = server_named("a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await complete(server)
        assert (server.num_running, server.engine.num_running) == (0, 0)

    run_virtual(main())


def test_invalid_requests_are_rejected() -> None:
    async def main() -> None:
        server = server_named("a")
        with pytest.raises(BadPrompt, match="0 tokens"):
            await server.generate(as_token_ids([]), SamplingParams(), "s")
        async with asyncio.TaskGroup() as group:
            group.create_task(complete(server))
            await asyncio.sleep(1)
            with pytest.raises(ServerError, match="already running"):
                await complete(server)
            with pytest.raises(ServerError, match="1 requests are still running"):
                await server.sleep()
        await server.sleep()
        with pytest.raises(ServerError, match="asleep"):
            await complete(server)
        await server.close()
        with pytest.raises(ServerDied, match="closed"):
            await complete(server)

    run_virtual(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_completion_is_continued_on_another_server(hangs: bool) -> None:
    async def main() -> None:
        servers = [server_named("a"), server_named("b")]
        manager = AsyncLLMServerManager(servers)
        async with manager.watching(), asyncio.TaskGroup() as group:
            task = group.create_task(manager.generate("s", prompt_ids=[99], sampling_params={}))
            await asyncio.sleep(4.5)
            home = next(server for server in servers if server.num_running)
            if hangs:
                home.hang()
            else:
                home.die()
            output = await task
            assert output.token_ids == list(range(100, 110))
            assert output.num_preempted == 1
            home.revive()
            await asyncio.sleep(20)
            assert len(manager.balancer.servers) == 2
        assert all(server.engine.num_running == server.num_running == 0 for server in servers)

    run_virtual(main())
