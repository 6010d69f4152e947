"""What a server's process does for its clients, with the line to them but without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from agent_loop.distributed.contexts import SentContexts, token_bytes
from agent_loop.distributed.mailbox import Mailbox
from agent_loop.distributed.serving import Serving
from agent_loop.distributed.wire import Ask, LineLost, PackedCompletion, Post, Refusal, Resend, Response
from agent_loop.errors import BadServerReply, ServerDied, ServerError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.types import IntArray, SamplingParams, TokenOutput, as_token_ids

HANGS = ScriptedReply([1], latency_s=float("inf"))
PARAMS = SamplingParams(temperature=0.5, max_tokens=7)


class Client:
    """One client of a server, that sends whole contexts."""

    def __init__(self, serving: Serving, name: str = "me") -> None:
        self.num_others: list[int] = []
        self._serving = serving
        self.mailbox = Mailbox(
            open_line=lambda: serving.open_line(name),
            exchange=self._exchange,
            on_reply=lambda reply: self.num_others.append(reply.num_others),
        )
        self._num_calls = 0

    async def ask(self, session: str, context: Sequence[int] = (1, 2, 3), **held: Any) -> Response:
        self._num_calls += 1
        delta = SentContexts().delta(session, as_token_ids(context))._replace(**held)
        return await self.mailbox.ask(Ask.pack(self._num_calls, session, delta, PARAMS))

    async def _exchange(self, packed: bytes) -> bytes:
        return pickle.dumps(await self._serving.exchange(pickle.loads(packed)))


def serve(server: Any, scenario: Callable[[Serving], Coroutine[Any, Any, None]]) -> None:
    """Runs a scenario, at the end of which nothing is held."""

    async def main() -> None:
        serving = Serving(server)
        await scenario(serving)
        await asyncio.sleep(1)
        assert not any(serving.inspect().values())
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def said(response: Response) -> TokenOutput:
    assert isinstance(response, PackedCompletion)
    return response.unpack()


def refused(response: Response) -> Exception:
    assert isinstance(response, Refusal)
    return response.error


def test_an_engine_gets_the_context_and_the_sampling_parameters_that_were_asked_for() -> None:
    server = ScriptedServer([ScriptedReply([4, 5]), ScriptedReply([7])])

    async def scenario(serving: Serving) -> None:
        client = Client(serving)
        assert said(await client.ask("s")).token_ids == [4, 5]
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
        assert said(await client.mailbox.ask(Ask.pack(9, "s", delta, PARAMS))).token_ids == [7]
        client.mailbox.end("s")

    serve(server, scenario)
    assert [request.prompt_ids.tolist() for request in server.requests] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert [request.sampling_params for request in server.requests] == [PARAMS, PARAMS]
    assert server.num_sessions == 0


def test_a_context_that_is_not_here_is_asked_for_again_and_what_ended_leaves_nothing() -> None:
    server = ScriptedServer(lambda _: ScriptedReply([4]))

    async def scenario(serving: Serving) -> None:
        client = Client(serving)
        assert await client.ask("s", num_held=3, checksum=1) == Resend()
        await run_together(client.ask(f"s{n}") for n in range(100))
        assert (serving.inspect()["contexts"], server.num_sessions) == (100, 100)
        for n in range(100):
            client.mailbox.end(f"s{n}")
        await client.mailbox.settled()
        assert (serving.inspect()["contexts"], server.num_sessions) == (0, 0)

    serve(server, scenario)


def test_a_session_that_ended_and_began_again_in_one_message_is_kept() -> None:
    async def scenario(serving: Serving) -> None:
        client = Client(serving)
        await client.ask("s")
        client.mailbox.end("s")
        await client.ask("s")
        assert serving.inspect()["contexts"] == 1
        client.mailbox.end("s")

    serve(ScriptedServer(lambda _: ScriptedReply([4])), scenario)


def test_a_cancelled_completion_ends_in_the_engine_and_the_others_go_on() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return HANGS if request.request_id == "hangs" else ScriptedReply([4], latency_s=2.0)

    server = ScriptedServer(script)

    async def scenario(serving: Serving) -> None:
        client = Client(serving)
        hanging, other = (asyncio.ensure_future(client.ask(name)) for name in ("hangs", "other"))
        await asyncio.sleep(1)
        assert server.num_running == 2
        hanging.cancel()
        await asyncio.sleep(0.1)
        assert (server.num_running, serving.inspect()["running"]) == (1, 1)
        assert said(await other).token_ids == [4]
        for name in ("hangs", "other"):
            client.mailbox.end(name)

    serve(server, scenario)


def test_a_client_that_died_takes_what_it_had_along_and_nothing_else() -> None:
    server = ScriptedServer(lambda _: HANGS)

    async def scenario(serving: Serving) -> None:
        dead, alive = Client(serving, "dead"), Client(serving, "alive")
        asked = [asyncio.ensure_future(dead.ask(f"d{n}")) for n in range(10)]
        living = asyncio.ensure_future(alive.ask("a"))
        await asyncio.sleep(1)
        assert (serving.num_others("dead"), serving.num_others("alive")) == (1, 10)
        await serving.drop_client("dead")
        await asyncio.sleep(1)
        assert (server.num_running, serving.inspect()["contexts"]) == (1, 1)
        for task in asked:
            with pytest.raises(LineLost, match=r"was started again|taken for dead"):
                await task
        with pytest.raises(LineLost, match="taken for dead"):
            await dead.ask("again")
        living.cancel()
        alive.mailbox.end("a")

    serve(server, scenario)


def test_whoever_begins_anew_finds_nothing_of_before() -> None:
    server = ScriptedServer(lambda _: HANGS)

    async def scenario(serving: Serving) -> None:
        first = Client(serving)
        lost = asyncio.ensure_future(first.ask("s"))
        await asyncio.sleep(1)
        assert await serving.open_line("me")
        await asyncio.sleep(1)
        assert not any(serving.inspect().values())
        assert (server.num_running, server.num_sessions) == (0, 0)
        with pytest.raises(LineLost):
            await lost

    serve(server, scenario)


class Breaks(ScriptedServer):
    """Fails in the way that the session says."""

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


def test_what_goes_wrong_in_an_engine_is_told_to_who_asked_and_to_nobody_else() -> None:
    names = ["refuses", "dies", "cancels", "cannot be sent", "has a bug"]

    async def scenario(serving: Serving) -> None:
        client = Client(serving)
        errors = [refused(response) for response in await run_together(map(client.ask, names))]
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
            client.mailbox.end(name)

    serve(Breaks([]), scenario)


def test_a_post_on_a_line_that_is_not_here_is_refused() -> None:
    async def scenario(serving: Serving) -> None:
        with pytest.raises(LineLost, match="started again"):
            await serving.exchange(Post("of another process", 3, [], [], []))

    serve(ScriptedServer([]), scenario)
