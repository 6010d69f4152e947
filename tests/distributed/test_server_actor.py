"""Requests of several clients at one server, and the tokens of in-flight completions that clients know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.distributed.messages import PackedError, ServerInfo
from agent_loop.distributed.partial_completions import (
    POLL_INTERVAL_S,
    PartialCompletionPoller,
    PartialCompletions,
)
from agent_loop.distributed.server_actor import ServerActor
from agent_loop.errors import BadServerReply, ServerDied, ServerError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids
from tests.distributed.project import OTHER_PROJECTS

pytestmark = pytest.mark.virtual_time
HANGS = ScriptedReply([1], latency_s=float("inf"))
PARAMS = SamplingParams(temperature=0.5, max_tokens=7)


class Client:
    """Client of a server."""

    def __init__(self, actor: ServerActor, name: str = "me") -> None:
        self.name = name
        self._actor = actor
        self._numbers = count()

    async def send(self, session: str) -> TokenOutput | Exception:
        """Send a request, and return its completion or its error. The call id of the first request is `NAME/0`."""
        response, _ = await self._actor.generate(
            self.name,
            f"{self.name}/{next(self._numbers)}",
            session,
            as_token_ids([1, 2, 3]),
            PARAMS,
        )
        return response.error if isinstance(response, PackedError) else decode_completion(response)


@asynccontextmanager
async def serving(server: Any) -> AsyncGenerator[ServerActor]:
    """Start the actor of a server. Check at the end that no task is left, and that the actor holds nothing."""
    actor = ServerActor(lambda: server, name="scripted-0", folder=".")
    await actor.ensure_started(None)
    yield actor
    await asyncio.sleep(1)
    assert not any((await actor.inspect()).values())
    assert len(asyncio.all_tasks()) == 1


async def test_an_end_that_arrives_after_the_session_has_begun_again_is_ignored() -> None:
    server = ScriptedServer(lambda _: ScriptedReply([4], latency_s=1.0))
    async with serving(server) as actor:
        client = Client(actor)
        running = asyncio.ensure_future(client.send("s"))
        await asyncio.sleep(0.5)
        await actor.end_session("me", "s")
        await running
        assert server.num_sessions == 1
        await actor.end_session("me", "s")
        assert server.num_sessions == 0


async def test_a_cancelled_completion_ends_in_the_engine_and_the_others_continue() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return HANGS if request.request_id == "hangs" else ScriptedReply([4], latency_s=2.0)

    server = ScriptedServer(script)
    async with serving(server) as actor:
        client = Client(actor)
        hanging, other = (asyncio.ensure_future(client.send(name)) for name in ("hangs", "other"))
        await asyncio.sleep(1)
        assert server.num_running == 2
        await actor.cancel("me/0")
        assert server.num_running == 1
        assert isinstance(await hanging, ServerError)
        output = await other
        assert isinstance(output, TokenOutput)
        assert output.token_ids == [4]
        for name in ("hangs", "other"):
            await actor.end_session("me", name)


async def test_a_request_whose_cancellation_arrived_first_is_not_run() -> None:
    server = ScriptedServer([])
    async with serving(server) as actor:
        await actor.cancel("me/0")
        assert "was cancelled" in str(await Client(actor).send("s"))
    assert server.requests == []


async def test_dropping_a_dead_client_ends_its_sessions_and_requests_only() -> None:
    server = ScriptedServer(lambda _: HANGS)
    async with serving(server) as actor:
        dead, alive = Client(actor, "dead"), Client(actor, "alive")
        asked = [asyncio.ensure_future(dead.send(f"d{n}")) for n in range(10)]
        living = asyncio.ensure_future(alive.send("a"))
        await asyncio.sleep(1)
        assert [(await actor.health(name))[1] for name in ("dead", "alive")] == [1, 10]
        await actor.drop_client("dead")
        assert (server.num_running, server.num_sessions) == (1, 1)
        assert all(isinstance(error, ServerError) for error in await asyncio.gather(*asked))
        assert "reported dead" in str(await dead.send("again"))
        await actor.cancel("alive/0")
        await living
        await actor.end_session("alive", "a")


async def test_closing_ends_all_requests_and_waits_for_them() -> None:
    server = ScriptedServer(lambda _: HANGS)
    async with serving(server) as actor:
        hanging = asyncio.ensure_future(Client(actor).send("s"))
        await asyncio.sleep(1)
        await actor.close()
        assert (server.num_running, server.num_sessions) == (0, 0)
        assert isinstance(await hanging, ServerError)


class Breaks(ScriptedServer):
    """Server that fails in different ways, selected by the name of the session."""

    async def stream(
        self, prompt_ids: IntArray, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[TokenChunk]:
        match request_id:
            case "never":
                yield TokenChunk([], [])
            case "refuses":
                raise ServerError("too hot", server=self.name)
            case "dies":
                raise ServerDied("out of memory")
            case "cancels":
                raise asyncio.CancelledError
            case "cannot be sent":
                error = ServerError("holds a function")
                error.__dict__["function"] = lambda: None
                raise error
            case _:
                raise ValueError("a bug")


async def test_an_error_of_an_engine_is_raised_by_its_request_only() -> None:
    expected = {
        "refuses": (ServerError, "too hot"),
        "dies": (ServerDied, "out of memory"),
        "cancels": (BadServerReply, "cancelled"),
        "cannot be sent": (ServerError, "holds a function"),
        "has a bug": (BadServerReply, "ValueError: a bug"),
    }
    async with serving(Breaks([])) as actor:
        errors = await run_together(map(Client(actor).send, expected))
        for error, (kind, part) in zip(errors, expected.values(), strict=True):
            assert type(error) is kind
            assert part in str(error)
        for name in expected:
            await actor.end_session("me", name)


async def test_partial_completions_are_the_chunks_that_the_client_does_not_know() -> None:
    server = ScriptedServer([ScriptedReply([4, 5, 6, 7], latency_s=4.0)], streams=True)
    async with serving(server) as actor:
        running = asyncio.ensure_future(Client(actor).send("s"))
        await asyncio.sleep(2.5)
        num_chunks, packed = (await actor.partial_completions({"me/0": 1}))["me/0"]
        assert (num_chunks, decode_completion(packed).token_ids) == (2, [5])
        assert await actor.partial_completions({"me/0": 2, "gone": 0}) == {}
        await running
        await actor.end_session("me", "s")


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


async def test_calls_are_polled_only_while_they_run() -> None:
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


async def test_polling_continues_when_a_dead_server_is_restarted() -> None:
    engine = Engine()
    poller = PartialCompletionPoller(engine.poll)
    with poller.polling("1") as chunks:
        engine.is_dead = True
        await asyncio.sleep(2.5 * POLL_INTERVAL_S)
        assert not chunks
        engine.is_dead = False
        await asyncio.sleep(POLL_INTERVAL_S)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 10


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
async def test_known_chunks_survive_a_restart_after_which_ray_repeats_the_call() -> None:
    from agent_loop.distributed.remote_server import RemoteServer

    info = ServerInfo("one", frozenset({Ability.STREAMING}), None)
    server = RemoteServer(RestartedActor(), client="me", info=info)
    with pytest.raises(ServerDied, match="not started yet") as caught:
        await server.generate(np.arange(4, dtype=np.int32), SamplingParams(), "a session")
    assert [token for chunk in caught.value.chunks for token in chunk.token_ids] == [0, 1, 2]


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
