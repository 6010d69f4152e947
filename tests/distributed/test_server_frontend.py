"""Frontend of a server and the clients' channels, without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from agent_loop.distributed.client_channel import ClientChannel
from agent_loop.distributed.contexts import SentContexts, token_bytes
from agent_loop.distributed.messages import (
    ChannelLost,
    ContextMissing,
    GenerationRequest,
    PackedCompletion,
    PackedError,
    RequestBatch,
    Response,
)
from agent_loop.distributed.server_frontend import ServerFrontend
from agent_loop.errors import BadServerReply, ServerDied, ServerError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.types import IntArray, SamplingParams, TokenOutput, as_token_ids

HANGS = ScriptedReply([1], latency_s=float("inf"))
PARAMS = SamplingParams(temperature=0.5, max_tokens=7)


class Client:
    """Client of a server that sends whole contexts."""

    def __init__(self, frontend: ServerFrontend, name: str = "me") -> None:
        self.num_others: list[int] = []
        self._frontend = frontend
        self.channel = ClientChannel(
            open_channel=lambda: frontend.open_channel(name),
            exchange=self._exchange,
            on_responses=lambda batch: self.num_others.append(batch.num_others),
        )
        self._num_requests = 0

    async def send(self, session: str, context: Sequence[int] = (1, 2, 3), **held: Any) -> Response:
        self._num_requests += 1
        delta = SentContexts().delta(session, as_token_ids(context))._replace(**held)
        return await self.channel.send(GenerationRequest.pack(self._num_requests, session, delta, PARAMS))

    async def _exchange(self, packed: bytes) -> bytes:
        return pickle.dumps(await self._frontend.exchange(pickle.loads(packed)))


def serve(server: Any, scenario: Callable[[ServerFrontend], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario. Check that no task is left, and that the frontend holds nothing."""

    async def main() -> None:
        frontend = ServerFrontend(server)
        await scenario(frontend)
        await asyncio.sleep(1)
        assert not any(frontend.inspect().values())
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def completion_of(response: Response) -> TokenOutput:
    assert isinstance(response, PackedCompletion)
    return response.unpack()


def error_of(response: Response) -> Exception:
    assert isinstance(response, PackedError)
    return response.error


def test_an_engine_gets_the_context_and_the_sampling_parameters_of_the_request() -> None:
    server = ScriptedServer([ScriptedReply([4, 5]), ScriptedReply([7])])

    async def scenario(frontend: ServerFrontend) -> None:
        client = Client(frontend)
        assert completion_of(await client.send("s")).token_ids == [4, 5]
        contexts = SentContexts()
        first = as_token_ids([1, 2, 3])
        contexts.keep(
            "s",
            delta=contexts.delta("s", first),
            prompt_ids=first,
            attachments=(),
            completion=token_bytes([4, 5]),
        )
        delta = contexts.delta("s", as_token_ids([1, 2, 3, 4, 5, 6]))
        assert completion_of(
            await client.channel.send(GenerationRequest.pack(9, "s", delta, PARAMS))
        ).token_ids == [7]
        client.channel.end_session("s")

    serve(server, scenario)
    assert [request.prompt_ids.tolist() for request in server.requests] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert [request.sampling_params for request in server.requests] == [PARAMS, PARAMS]
    assert server.num_sessions == 0


def test_a_missing_context_is_reported_and_ended_sessions_are_freed() -> None:
    server = ScriptedServer(lambda _: ScriptedReply([4]))

    async def scenario(frontend: ServerFrontend) -> None:
        client = Client(frontend)
        assert await client.send("s", num_held=3, checksum=1) == ContextMissing()
        await run_together(client.send(f"s{n}") for n in range(100))
        assert (frontend.inspect()["contexts"], server.num_sessions) == (100, 100)
        for n in range(100):
            client.channel.end_session(f"s{n}")
        await client.channel.flush()
        assert (frontend.inspect()["contexts"], server.num_sessions) == (0, 0)

    serve(server, scenario)


def test_a_session_that_ended_and_began_again_in_one_message_is_kept() -> None:
    async def scenario(frontend: ServerFrontend) -> None:
        client = Client(frontend)
        await client.send("s")
        client.channel.end_session("s")
        await client.send("s")
        assert frontend.inspect()["contexts"] == 1
        client.channel.end_session("s")

    serve(ScriptedServer(lambda _: ScriptedReply([4])), scenario)


def test_a_cancelled_completion_ends_in_the_engine_and_the_others_continue() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return HANGS if request.request_id == "hangs" else ScriptedReply([4], latency_s=2.0)

    server = ScriptedServer(script)

    async def scenario(frontend: ServerFrontend) -> None:
        client = Client(frontend)
        hanging, other = (asyncio.ensure_future(client.send(name)) for name in ("hangs", "other"))
        await asyncio.sleep(1)
        assert server.num_running == 2
        hanging.cancel()
        await asyncio.sleep(0.1)
        assert (server.num_running, frontend.inspect()["running"]) == (1, 1)
        assert completion_of(await other).token_ids == [4]
        for name in ("hangs", "other"):
            client.channel.end_session(name)

    serve(server, scenario)


def test_dropping_a_dead_client_ends_its_sessions_and_requests_only() -> None:
    server = ScriptedServer(lambda _: HANGS)

    async def scenario(frontend: ServerFrontend) -> None:
        dead, alive = Client(frontend, "dead"), Client(frontend, "alive")
        asked = [asyncio.ensure_future(dead.send(f"d{n}")) for n in range(10)]
        living = asyncio.ensure_future(alive.send("a"))
        await asyncio.sleep(1)
        assert (frontend.num_others("dead"), frontend.num_others("alive")) == (1, 10)
        await frontend.drop_client("dead")
        await asyncio.sleep(1)
        assert (server.num_running, frontend.inspect()["contexts"]) == (1, 1)
        for task in asked:
            with pytest.raises(ChannelLost, match=r"was restarted|reported dead"):
                await task
        with pytest.raises(ChannelLost, match="reported dead"):
            await dead.send("again")
        living.cancel()
        alive.channel.end_session("a")

    serve(server, scenario)


def test_closing_ends_all_requests_and_waits_for_them() -> None:
    server = ScriptedServer(lambda _: HANGS)

    async def scenario(frontend: ServerFrontend) -> None:
        client = Client(frontend)
        hanging = asyncio.ensure_future(client.send("s"))
        await asyncio.sleep(1)
        await frontend.close()
        assert (server.num_running, server.num_sessions) == (0, 0)
        with pytest.raises(ChannelLost):
            await hanging

    serve(server, scenario)


def test_opening_a_channel_ends_the_earlier_channel_of_the_client() -> None:
    server = ScriptedServer(lambda _: HANGS)

    async def scenario(frontend: ServerFrontend) -> None:
        first = Client(frontend)
        lost = asyncio.ensure_future(first.send("s"))
        await asyncio.sleep(1)
        assert await frontend.open_channel("me")
        await asyncio.sleep(1)
        assert not any(frontend.inspect().values())
        assert (server.num_running, server.num_sessions) == (0, 0)
        with pytest.raises(ChannelLost):
            await lost

    serve(server, scenario)


class Breaks(ScriptedServer):
    """Server that fails in different ways, selected by the name of the session."""

    async def generate(
        self, prompt_ids: IntArray, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> TokenOutput:
        match request_id:
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
    names = ["refuses", "dies", "cancels", "cannot be sent", "has a bug"]

    async def scenario(frontend: ServerFrontend) -> None:
        client = Client(frontend)
        errors = [error_of(response) for response in await run_together(map(client.send, names))]
        assert [type(error) for error in errors] == [
            ServerError,
            ServerDied,
            BadServerReply,
            ServerError,
            BadServerReply,
        ]
        for error, part in zip(
            errors,
            ("too hot", "out of memory", "cancelled", "holds a function", "ValueError: a bug"),
            strict=True,
        ):
            assert part in str(error)
        for name in names:
            client.channel.end_session(name)

    serve(Breaks([]), scenario)


def test_a_batch_on_an_unknown_channel_is_refused() -> None:
    async def scenario(frontend: ServerFrontend) -> None:
        with pytest.raises(ChannelLost, match="restarted"):
            await frontend.exchange(RequestBatch("of another process", 3, [], [], []))

    serve(ScriptedServer([]), scenario)
