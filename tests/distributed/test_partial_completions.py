"""Clients know the tokens of in-flight completions shortly after the server sampled them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.distributed.messages import ServerInfo
from agent_loop.distributed.partial_completions import (
    POLL_INTERVAL_S,
    PartialCompletionPoller,
    PartialCompletions,
)
from agent_loop.errors import ServerDied
from agent_loop.servers.base import Ability
from agent_loop.testing import run_virtual
from agent_loop.trajectory.codec import encode_completion
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput
from tests.distributed.project import OTHER_PROJECTS

CHUNKS = [TokenChunk([n], [-0.5 * n], weight_version=n // 4) for n in range(10)]


def packed(chunks: list[TokenChunk]) -> bytes:
    return encode_completion(TokenOutput.from_chunks(chunks))


class Engine:
    """Server that samples a token every 0.3 s for each call."""

    def __init__(self) -> None:
        self.num_polls = 0
        self.is_dead = False

    async def poll(self, num_known: Mapping[str, int]) -> PartialCompletions:
        self.num_polls += 1
        if self.is_dead:
            raise ServerDied("killed")
        count = min(int(asyncio.get_running_loop().time() / 0.3), len(CHUNKS))
        return {
            call: (count, packed(CHUNKS[known:count])) for call, known in num_known.items() if known < count
        }


def test_calls_are_polled_only_while_they_run() -> None:
    async def scenario() -> None:
        engine = Engine()
        poller = PartialCompletionPoller(engine.poll)
        with poller.polling("1") as first:
            await asyncio.sleep(1.5 * POLL_INTERVAL_S)
            with poller.polling("2") as second:
                assert [chunk.token_ids for chunk in first] == [[0, 1, 2]]
                await asyncio.sleep(POLL_INTERVAL_S)
                assert [token for chunk in first for token in chunk.token_ids] == list(range(6))
                assert [token for chunk in second for token in chunk.token_ids] == list(range(6))
                assert [(chunk.weight_version, chunk.stop_reason) for chunk in second] == [
                    (0, None),
                    (1, None),
                ]
                assert [p for chunk in second for p in chunk.logprobs or ()] == [-0.5 * n for n in range(6)]
        num_polls = engine.num_polls
        await asyncio.sleep(60)
        assert engine.num_polls == num_polls == 2
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


def test_polling_continues_when_a_dead_server_is_restarted() -> None:
    async def scenario() -> None:
        engine = Engine()
        poller = PartialCompletionPoller(engine.poll)
        with poller.polling("1") as chunks:
            engine.is_dead = True
            await asyncio.sleep(2.5 * POLL_INTERVAL_S)
            assert not chunks
            engine.is_dead = False
            await asyncio.sleep(POLL_INTERVAL_S)
            assert sum(len(chunk.token_ids) for chunk in chunks) == 10

    run_virtual(scenario())


class Method:
    """Stub of a method of a Ray actor handle."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class RestartedActor:
    """Actor that is killed after 2.5 s and restarted, and to which Ray repeats the call."""

    def __init__(self) -> None:
        self.generate = Method(self._generate)
        self.partial_completions = Method(self._partial_completions)

    async def _generate(self, *_: Any) -> Any:
        await asyncio.sleep(2.5 * POLL_INTERVAL_S)
        raise ServerDied("it has not started yet")

    async def _partial_completions(self, num_known: Mapping[str, int]) -> PartialCompletions:
        return {call: (3, packed(CHUNKS[num:3])) for call, num in num_known.items() if num < 3}


@pytest.mark.ray
def test_known_chunks_survive_a_restart_after_which_ray_repeats_the_call() -> None:
    from agent_loop.distributed.remote_server import RemoteServer

    async def scenario() -> None:
        info = ServerInfo("one", frozenset({Ability.STREAMING}), None)
        server = RemoteServer(RestartedActor(), client="me", info=info)
        with pytest.raises(ServerDied, match="not started yet") as caught:
            await server.generate(np.arange(4, dtype=np.int32), SamplingParams(), "a session")
        assert [token for chunk in caught.value.chunks for token in chunk.token_ids] == [0, 1, 2]

    run_virtual(scenario())


@OTHER_PROJECTS
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_completion_is_resumed_at_the_token_at_which_its_server_was_killed(tmp_path: Path) -> None:
    from tests.distributed.cluster import ClusterHarness
    from tests.distributed.project import make_config, make_project, rows

    folder = make_project(tmp_path)
    config = make_config(folder, script="counts", streams=True, num_servers=2, num_workers=1)

    with ClusterHarness(config, folder=folder, cluster=None) as harness:

        async def kill_in_the_middle() -> None:
            while len(starts(folder)) < 8:  # noqa: ASYNC110  (other processes write the file)
                await asyncio.sleep(0.1)
            await asyncio.sleep(7 * POLL_INTERVAL_S)  # half of the time that they take
            await harness.kill_server()

        async def main() -> list[list[int]]:
            async with asyncio.TaskGroup() as group:
                group.create_task(kill_in_the_middle())
                trajectories = await harness.manager.run(rows(8))
            return [t.output.response_ids.tolist() for t in trajectories]

        assert harness.runner.run(main()) == [list(range(100, 160))] * 8
        assert not any(harness.runner.run(harness.held()).values())
    assert starts(folder).count(0) == 8
    assert len(starts(folder)) == 12


def starts(folder: Path) -> list[int]:
    """Return the number at which each completion so far began to count."""
    log = folder / "counted_from.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []
