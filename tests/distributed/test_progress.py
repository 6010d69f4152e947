"""What a server has sampled so far is known elsewhere, a moment later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.distributed.progress import ASK_EVERY_S, Parts, Progress, pack_unfinished
from agent_loop.distributed.wire import LineLost, ServerFacts
from agent_loop.errors import ServerDied
from agent_loop.servers.base import Ability
from agent_loop.testing import run_virtual
from agent_loop.types import SamplingParams, TokenChunk
from tests.distributed.project import OTHER_PROJECTS

CHUNKS = [TokenChunk([n], [-0.5 * n], weight_version=n // 4) for n in range(10)]


class Engine:
    """Samples a token every 0.3 s for each of its calls."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_dead = False

    async def parts(self, num_known: Mapping[int, int]) -> Parts:
        self.num_asked += 1
        if self.is_dead:
            raise ServerDied("killed")
        count = min(int(asyncio.get_running_loop().time() / 0.3), len(CHUNKS))
        return {
            call: (count, pack_unfinished(CHUNKS[known:count]))
            for call, known in num_known.items()
            if known < count
        }


def test_calls_are_looked_after_while_they_run_and_not_longer() -> None:
    async def scenario() -> None:
        engine = Engine()
        progress = Progress(engine.parts)
        with progress.watching(1) as first:
            await asyncio.sleep(1.5 * ASK_EVERY_S)
            with progress.watching(2) as second:
                assert [chunk.token_ids for chunk in first] == [[0, 1, 2]]
                await asyncio.sleep(ASK_EVERY_S)
                assert [token for chunk in first for token in chunk.token_ids] == list(range(6))
                assert [token for chunk in second for token in chunk.token_ids] == list(range(6))
                assert [(chunk.weight_version, chunk.stop_reason) for chunk in second] == [
                    (0, None),
                    (1, None),
                ]
                assert [p for chunk in second for p in chunk.logprobs or ()] == [-0.5 * n for n in range(6)]
        num_asked = engine.num_asked
        await asyncio.sleep(60)
        assert engine.num_asked == num_asked == 2
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


def test_a_dead_server_tells_nothing_new_and_one_that_is_back_does() -> None:
    async def scenario() -> None:
        engine = Engine()
        progress = Progress(engine.parts)
        with progress.watching(1) as chunks:
            engine.is_dead = True
            await asyncio.sleep(2.5 * ASK_EVERY_S)
            assert not chunks
            engine.is_dead = False
            await asyncio.sleep(ASK_EVERY_S)
            assert sum(len(chunk.token_ids) for chunk in chunks) == 10

    run_virtual(scenario())


def test_a_call_that_is_made_again_at_once_is_looked_after() -> None:
    async def scenario() -> None:
        progress = Progress(Engine().parts)
        with progress.watching(1):
            await asyncio.sleep(0.5 * ASK_EVERY_S)
        with progress.watching(2) as chunks:
            await asyncio.sleep(1.5 * ASK_EVERY_S)
            assert [token for chunk in chunks for token in chunk.token_ids] == list(range(5))

    run_virtual(scenario())


class Method:
    """What a Ray handle has in place of a method."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method

    def options(self, **_: object) -> Method:
        return self


class StartedAnew:
    """An actor that Ray kills after 2.5 s, starts again, and gives the post once more."""

    def __init__(self) -> None:
        self.open_line = Method(self._open_line)
        self.exchange = Method(self._exchange)
        self.parts = Method(self._parts)

    async def _open_line(self, client: str) -> str:
        return "line"

    async def _exchange(self, packed: bytes) -> bytes:
        await asyncio.sleep(2.5 * ASK_EVERY_S)
        raise LineLost("it is not up yet")

    async def _parts(self, client: str, num_known: Mapping[int, int]) -> Parts:
        return {call: (3, pack_unfinished(CHUNKS[num:3])) for call, num in num_known.items() if num < 3}


@pytest.mark.ray
def test_what_is_known_outlives_a_server_that_ray_asked_again_after_a_restart() -> None:
    from agent_loop.distributed.remote_server import RemoteServer

    async def scenario() -> None:
        facts = ServerFacts("one", frozenset({Ability.STREAMING}), None)
        server = RemoteServer(StartedAnew(), client="me", facts=facts)
        with pytest.raises(ServerDied, match="not up yet") as caught:
            await server.generate(np.arange(4, dtype=np.int32), SamplingParams(), "a session")
        assert [token for chunk in caught.value.chunks for token in chunk.token_ids] == [0, 1, 2]

    run_virtual(scenario())


@OTHER_PROJECTS
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_completion_goes_on_where_its_server_was_killed(tmp_path: Path) -> None:
    from tests.distributed.cluster import Stage
    from tests.distributed.project import make_config, make_project, rows

    folder = make_project(tmp_path)
    config = make_config(folder, script="counts", streams=True, num_servers=2, num_workers=1)

    with Stage(config, folder=folder, cluster=None) as stage:

        async def kill_in_the_middle() -> None:
            while len(starts(folder)) < 8:  # noqa: ASYNC110  (it is other processes that write)
                await asyncio.sleep(0.1)
            await asyncio.sleep(7 * ASK_EVERY_S)  # half of the time that they take
            await stage.kill_server()

        async def main() -> list[list[int]]:
            async with asyncio.TaskGroup() as group:
                group.create_task(kill_in_the_middle())
                trajectories = await stage.manager.run(rows(8))
            return [t.output.response_ids.tolist() for t in trajectories]

        assert stage.runner.run(main()) == [list(range(100, 160))] * 8
        assert not any(stage.runner.run(stage.held()).values())
    assert starts(folder).count(0) == 8
    assert len(starts(folder)) == 12


def starts(folder: Path) -> list[int]:
    """The number at which each completion so far began to count."""
    log = folder / "counted_from.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []
