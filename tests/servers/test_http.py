"""Tests of the HTTP client of engines, with a real server on a local port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agent_loop.errors import BadServerReply, ServerDied, ServerTimeout
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.openai_compatible import OpenAIServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def engine(handler: Handler, *, timeout_s: float = 30.0) -> AsyncGenerator[HttpClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    client = HttpClient(f"http://{host}:{port}/", server="vllm-0", timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


async def events(request: web.Request, *lines: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for line in lines:
        await response.write(line.encode())
    return response


async def test_an_error_status_names_the_server_the_request_and_the_body() -> None:
    async with engine(respond_with(499, b"too\nlong")) as client:
        with pytest.raises(
            HttpStatusError,
            match=r"server vllm-0 request r7: POST /generate returned 499 .*too long",
        ) as caught:
            await client.post_json("/generate", {}, request_id="r7")
        assert caught.value.status == 499


async def test_a_response_that_is_not_json_is_a_bad_reply() -> None:
    async with engine(respond_with(body=b"<html>")) as client:
        with pytest.raises(BadServerReply, match=r"request r: /generate returned invalid JSON .*<html>"):
            await client.post_json("/generate", {}, request_id="r")
    async with engine(respond_with(body=b'"\xff"')) as client:
        with pytest.raises(BadServerReply, match="not UTF-8"):
            await client.post_json("/generate", {}, request_id="r")


async def test_a_line_of_a_stream_that_is_too_long_is_a_bad_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_loop.servers.http.MAX_LINE_BYTES", 1000)

    async def long(request: web.Request) -> web.StreamResponse:
        return await events(request, "data: " + "x" * 5000)

    async with engine(long) as client:
        with pytest.raises(BadServerReply, match="did not return an event stream"):
            [event async for event in client.stream_events("/generate", {})]


@pytest.mark.parametrize("body", [b"7", b"[]", b'{"data": 3}', b'{"data": [3]}', b'{"data": [{}]}', b"null"])
async def test_json_with_unexpected_fields_at_the_start_is_a_bad_reply(body: bytes) -> None:
    async with engine(respond_with(body=body)) as client:
        server = OpenAIServer(client.url, name="gpu-1")
        with pytest.raises(BadServerReply, match="server gpu-1: a reply cannot be read"):
            await server.start()
        await server.close()


async def test_a_hung_server_raises_server_timeout_at_the_time_limit() -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with engine(hang, timeout_s=0.05) as client:
        with pytest.raises(ServerTimeout, match=r"no response from http.*/generate within 0.05 s"):
            await client.post_json("/generate", {})
        with pytest.raises(ServerTimeout):
            [event async for event in client.stream_events("/generate", {})]


async def test_an_unreachable_server_raises_server_died() -> None:
    async with engine(respond_with()) as client:
        pass
    client = HttpClient(client.url, server="vllm-0")
    with pytest.raises(ServerDied, match=r"server vllm-0 request r: .*cannot be reached") as caught:
        await client.post_json("/generate", {}, request_id="r")
    assert caught.value.__cause__ is not None
    await client.close()


async def test_a_broken_stream_yields_the_events_received_and_raises_server_died() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = await events(request, 'data: {"n": 1}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    received: list[object] = []
    async with engine(cut) as client:
        with pytest.raises(ServerDied):
            async for event in client.stream_events("/generate", {}):
                received.append(event)  # noqa: PERF401  (events before the break must be kept)
    assert received == [{"n": 1}]


async def test_a_stream_ends_at_done_and_skips_comments() -> None:
    async def two(request: web.Request) -> web.StreamResponse:
        return await events(
            request, ": ping\n\n", 'data: {"n": 1}\n\n', 'data:{"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n'
        )

    async with engine(two) as client:
        assert [event async for event in client.stream_events("/generate", {})] == [{"n": 1}, {"n": 2}]


async def test_leaving_a_stream_early_cancels_the_request_on_the_server() -> None:
    was_left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = await events(request, 'data: {"n": 1}\n\n')
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_left.set()
            raise
        return response

    async with engine(endless) as client:
        stream = client.stream_events("/generate", {})
        assert await anext(stream) == {"n": 1}
        await stream.aclose()
        async with asyncio.timeout(10):
            await was_left.wait()


async def test_closing_the_client_ends_pending_requests_immediately() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = await events(request, 'data: {"n": 1}\n\n')
        await asyncio.Event().wait()
        return response

    async with engine(endless) as client:
        stream = client.stream_events("/generate", {})
        assert await anext(stream) == {"n": 1}
        reading = asyncio.ensure_future(anext(stream))
        waiting = asyncio.ensure_future(client.post_json("/generate"))
        await asyncio.sleep(0.05)
        await client.close()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(reading, waiting, return_exceptions=True)
        assert [type(each) for each in ended] == [ServerDied, ServerDied]


def respond_with(status: int = 200, body: bytes = b"") -> Handler:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    return respond
