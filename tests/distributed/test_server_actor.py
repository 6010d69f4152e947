"""Requests of several clients at one server, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from itertools import count
from typing import Any

from agent_loop.distributed.messages import PackedError
from agent_loop.distributed.server_actor import ServerActor
from agent_loop.errors import BadServerReply, ServerDied, ServerError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory.codec import decode_completion
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

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


def serve(server: Any, scenario: Callable[[ServerActor], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario. Check that no task is left, and that the actor holds nothing."""

    async def main() -> None:
        actor = ServerActor(lambda: server, name="scripted-0", folder=".")
        await actor.ensure_started(None)
        await scenario(actor)
        await asyncio.sleep(1)
        assert not any((await actor.inspect()).values())
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_an_end_that_arrives_after_the_session_has_begun_again_is_ignored() -> None:
    server = ScriptedServer(lambda _: ScriptedReply([4], latency_s=1.0))

    async def scenario(actor: ServerActor) -> None:
        client = Client(actor)
        running = asyncio.ensure_future(client.send("s"))
        await asyncio.sleep(0.5)
        await actor.end_session("me", "s")
        await running
        assert server.num_sessions == 1
        await actor.end_session("me", "s")
        assert server.num_sessions == 0

    serve(server, scenario)


def test_a_cancelled_completion_ends_in_the_engine_and_the_others_continue() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return HANGS if request.request_id == "hangs" else ScriptedReply([4], latency_s=2.0)

    server = ScriptedServer(script)

    async def scenario(actor: ServerActor) -> None:
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

    serve(server, scenario)


def test_a_request_whose_cancellation_arrived_first_is_not_run() -> None:
    server = ScriptedServer([])

    async def scenario(actor: ServerActor) -> None:
        await actor.cancel("me/0")
        assert "was cancelled" in str(await Client(actor).send("s"))

    serve(server, scenario)
    assert server.requests == []


def test_dropping_a_dead_client_ends_its_sessions_and_requests_only() -> None:
    server = ScriptedServer(lambda _: HANGS)

    async def scenario(actor: ServerActor) -> None:
        dead, alive = Client(actor, "dead"), Client(actor, "alive")
        asked = [asyncio.ensure_future(dead.send(f"d{n}")) for n in range(10)]
        living = asyncio.ensure_future(alive.send("a"))
        await asyncio.sleep(1)
        assert [(await actor.health(name))[1] for name in ("dead", "alive")] == [1, 10]
        await actor.drop_client("dead")
        assert (server.num_running, server.num_sessions) == (1, 1)
        assert all(isinstance(error, ServerError) for error in await run_together(_wait(t) for t in asked))
        assert "reported dead" in str(await dead.send("again"))
        await actor.cancel("alive/0")
        await living
        await actor.end_session("alive", "a")

    serve(server, scenario)


async def _wait(task: asyncio.Future[Any]) -> Any:
    return await task


def test_closing_ends_all_requests_and_waits_for_them() -> None:
    server = ScriptedServer(lambda _: HANGS)

    async def scenario(actor: ServerActor) -> None:
        hanging = asyncio.ensure_future(Client(actor).send("s"))
        await asyncio.sleep(1)
        await actor.close()
        assert (server.num_running, server.num_sessions) == (0, 0)
        assert isinstance(await hanging, ServerError)

    serve(server, scenario)


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


def test_an_error_of_an_engine_is_raised_by_its_request_only() -> None:
    expected = {
        "refuses": (ServerError, "too hot"),
        "dies": (ServerDied, "out of memory"),
        "cancels": (BadServerReply, "cancelled"),
        "cannot be sent": (ServerError, "holds a function"),
        "has a bug": (BadServerReply, "ValueError: a bug"),
    }

    async def scenario(actor: ServerActor) -> None:
        errors = await run_together(map(Client(actor).send, expected))
        for error, (kind, part) in zip(errors, expected.values(), strict=True):
            assert type(error) is kind
            assert part in str(error)
        for name in expected:
            await actor.end_session("me", name)

    serve(Breaks([]), scenario)


def test_partial_completions_are_the_chunks_that_the_client_does_not_know() -> None:
    server = ScriptedServer([ScriptedReply([4, 5, 6, 7], latency_s=4.0)], streams=True)

    async def scenario(actor: ServerActor) -> None:
        running = asyncio.ensure_future(Client(actor).send("s"))
        await asyncio.sleep(2.5)
        num_chunks, packed = (await actor.partial_completions({"me/0": 1}))["me/0"]
        assert (num_chunks, decode_completion(packed).token_ids) == (2, [5])
        assert await actor.partial_completions({"me/0": 2, "gone": 0}) == {}
        await running
        await actor.end_session("me", "s")

    serve(server, scenario)
