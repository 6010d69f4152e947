"""Tests of the client of OpenAI-compatible servers, and of the HTTP client of engines, with servers on a local port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from msgspec import structs

from agent_loop.checks import Reference, check_server
from agent_loop.config import ModelConfig, RolloutConfig
from agent_loop.errors import (
    BadPrompt,
    BadServerReply,
    ConfigError,
    SamplingParamsError,
    ServerDied,
    ServerError,
    ServerTimeout,
    WeightsError,
)
from agent_loop.servers.base import Ability
from agent_loop.servers.factory import create_servers
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.openai_compatible import OpenAIOptions, OpenAIServer
from agent_loop.types import SamplingParams, as_token_ids
from tests.helpers import small_tokenizer
from tests.serve.applications import MODEL, embedded, serve_app, tiny_lm
from tests.servers.harness import Handler, broken_off, events, http_server

# -- HTTP --------------------------------------------------------------------------------------------------------------

ONE = 'data: {"n": 1}\n\n'


@asynccontextmanager
async def http_client(handler: Handler, *, timeout_s: float = 30.0) -> AsyncGenerator[HttpClient]:
    async with http_server(handler) as url:
        client = HttpClient(url, server="vllm-0", timeout_s=timeout_s)
        try:
            yield client
        finally:
            await client.close()


def respond_with(status: int = 200, body: bytes = b"") -> Handler:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    return respond


def stream_of(*lines: str, ends: bool = True) -> Handler:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await events(request, *lines)
        if not ends:
            await asyncio.Event().wait()
        return response

    return respond


async def hang(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def read_all(client: HttpClient) -> list[Any]:
    return [event async for event in client.stream_events("/generate", {})]


async def test_an_error_status_names_the_server_the_request_and_the_body() -> None:
    async with http_client(respond_with(499, b"too\nlong")) as client:
        named = r"server vllm-0 request r7: POST /generate returned 499 .*too long"
        with pytest.raises(HttpStatusError, match=named) as caught:
            await client.post_json("/generate", {}, request_id="r7")
        assert caught.value.status == 499


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"<html>", "request r: /generate returned invalid JSON .*<html>"), (b'"\xff"', "not UTF-8")],
)
async def test_a_response_that_is_not_json_is_a_bad_reply(body: bytes, message: str) -> None:
    async with http_client(respond_with(body=body)) as client:
        with pytest.raises(BadServerReply, match=message):
            await client.post_json("/generate", {}, request_id="r")


async def test_a_line_of_a_stream_that_is_too_long_is_a_bad_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_loop.servers.http.MAX_LINE_BYTES", 1000)
    async with http_client(stream_of("data: " + "x" * 5000)) as client:
        with pytest.raises(BadServerReply, match="did not return an event stream"):
            await read_all(client)


async def test_a_hung_server_raises_server_timeout_at_the_time_limit() -> None:
    async with http_client(hang, timeout_s=0.05) as client:
        with pytest.raises(ServerTimeout, match=r"no response from http.*/generate within 0.05 s"):
            await client.post_json("/generate", {})
        with pytest.raises(ServerTimeout):
            await read_all(client)


async def test_an_unreachable_server_raises_server_died() -> None:
    async with http_server(hang) as url:
        client = HttpClient(url, server="vllm-0")
    with pytest.raises(ServerDied, match=r"server vllm-0 request r: .*cannot be reached") as caught:
        await client.post_json("/generate", {}, request_id="r")
    assert caught.value.__cause__ is not None
    await client.close()


async def test_a_broken_stream_yields_the_events_received_and_raises_server_died() -> None:
    received: list[object] = []
    async with http_client(lambda request: broken_off(request, ONE)) as client:
        with pytest.raises(ServerDied):
            async for event in client.stream_events("/generate", {}):
                received.append(event)  # noqa: PERF401  (events before the break must be kept)
    assert received == [{"n": 1}]


async def test_a_stream_ends_at_done_and_skips_comments() -> None:
    lines = (": ping\n\n", ONE, 'data:{"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n')
    async with http_client(stream_of(*lines)) as client:
        assert await read_all(client) == [{"n": 1}, {"n": 2}]


async def test_leaving_a_stream_early_cancels_the_request_on_the_server() -> None:
    was_left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        try:
            return await stream_of(ONE, ends=False)(request)
        except asyncio.CancelledError:
            was_left.set()
            raise

    async with http_client(endless) as client:
        stream = client.stream_events("/generate", {})
        assert await anext(stream) == {"n": 1}
        await stream.aclose()
        async with asyncio.timeout(10):
            await was_left.wait()


async def test_closing_the_client_ends_pending_requests_immediately() -> None:
    async with http_client(stream_of(ONE, ends=False)) as client:
        stream = client.stream_events("/generate", {})
        assert await anext(stream) == {"n": 1}
        reading = asyncio.ensure_future(anext(stream))
        waiting = asyncio.ensure_future(client.post_json("/generate"))
        await asyncio.sleep(0.05)
        await client.close()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(reading, waiting, return_exceptions=True)
        assert [type(each) for each in ended] == [ServerDied, ServerDied]


# -- configuration and start -------------------------------------------------------------------------------------------

CHOICE = {"token_ids": [4], "finish_reason": "stop"}
MODELS = {"data": [{"id": MODEL}]}


def refusal(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


@asynccontextmanager
async def server_of(handler: Handler, **options: Any) -> AsyncGenerator[OpenAIServer]:
    """Yield a client that has not been started. `handler` gets all requests but those for the models."""

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response(MODELS) if request.path == "/v1/models" else await handler(request)

    async with http_server(respond) as url:
        server = OpenAIServer(url, options=OpenAIOptions(**options))
        try:
            yield server
        finally:
            await server.close()


@pytest.mark.slow
async def test_the_client_of_agent_loop_serve_passes_the_server_checks() -> None:
    with serve_app([embedded()]) as served:
        server = OpenAIServer(served.url, options=OpenAIOptions(logprobs="scaled"))
        await server.start()
        report = await check_server(server, max_model_len=256, reference=Reference(tiny_lm()))
    report.raise_if_failed()
    assert report.named("skipped") == [
        "the likeliest tokens and their log-probs are those of the model",
        "a completion under a schema ends where the text is complete",
        "a resumed completion with a seed samples the same tokens",
        "completions after a weight update come from the new weights",
        "invalid weights are refused and change nothing",
        "requests in flight continue across a weight update",
    ]


def test_each_url_of_a_configuration_becomes_a_server() -> None:
    def servers(engine: str = "openai", urls: tuple[str, ...] = (), **kwargs: Any) -> list[str]:
        rollout = RolloutConfig(engine=engine, server_urls=list(urls), engine_kwargs=kwargs)
        return [server.name for server in create_servers(ModelConfig(), rollout=rollout)]

    assert servers(urls=("http://a:1", "http://b:2/v1")) == ["openai-0", "openai-1"]
    with pytest.raises(ConfigError, match=r"server_urls is empty; set URLs for one of openai, sglang, vllm"):
        servers()
    with pytest.raises(ConfigError, match=r"this engine is not reached by a URL"):
        servers("embedded", ("http://a:1",))
    with pytest.raises(ConfigError, match="logprob"):
        servers(urls=("http://a:1",), logprob=1)
    with pytest.raises(ConfigError, match="'NO_SUCH_KEY', but that variable is not set"):
        OpenAIServer("http://a:1", options=OpenAIOptions(api_key_env="NO_SUCH_KEY"))


@pytest.mark.parametrize(
    ("options", "reply", "message"),
    [
        ({"served_model_name": "mine"}, {}, f"serves {MODEL}, not 'mine'"),
        ({}, {"text": "x", "finish_reason": "length"}, "does not return token_ids"),
        ({"offers": ("json_schema",)}, CHOICE, "remove json_schema from rollout.engine_kwargs.offers"),
    ],
)
async def test_a_server_that_does_not_suit_is_refused(options: Any, reply: Any, message: str) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        if "response_format" in await request.json():
            return refusal("no grammar")
        return web.json_response({"choices": [reply]})

    async with server_of(respond, **options) as server:
        with pytest.raises(ConfigError, match=message):
            await server.start()


@pytest.mark.parametrize("body", [b"7", b'{"data": 3}', b'{"data": [{}]}', b"null"])
async def test_models_that_cannot_be_read_are_a_bad_reply(body: bytes) -> None:
    async with http_server(respond_with(body=body)) as url:
        server = OpenAIServer(url, name="gpu-1")
        with pytest.raises(BadServerReply, match="server gpu-1: a reply cannot be read"):
            await server.start()
        await server.close()


# -- completions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (
            stream_of('data: {"choices": [{"token_ids": [1], "finish_reason": "because"}]}\n\n'),
            BadServerReply,
        ),
        (stream_of('data: {"choices": 3}\n\n'), BadServerReply),
        (stream_of('data: {"choices": [{"token_ids": [1]}]}\n\n', "data: [DONE]\n\n"), BadServerReply),
        (stream_of('data: {"error": {"message": "no memory"}}\n\n'), ServerError),
        (respond_with(400, b'{"error": {"message": "too long"}}'), BadPrompt),
        (lambda request: broken_off(request, 'data: {"choices": [{"token_ids": [1]}]}\n\n'), ServerDied),
    ],
)
async def test_a_failed_completion_raises_an_error_that_names_server_and_request(
    handler: Handler, error: type[Exception]
) -> None:
    async with server_of(handler) as server:
        server._trouble = ""
        with pytest.raises(error, match="server openai-0 request r"):
            await server.generate(as_token_ids([1, 2]), SamplingParams(), "r")
        with pytest.raises(WeightsError, match="accepts no weights"):
            await server.update_weights([], weight_version=1)


async def test_schemas_and_penalties_are_sent_to_a_server_that_offers_them_and_refused_for_others() -> None:
    bodies: list[dict[str, Any]] = []

    async def constrained(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        reply = {"choices": [CHOICE]}
        if not bodies[-1].get("stream"):
            return web.json_response(reply)
        return await events(request, f"data: {json.dumps(reply)}\n\n")

    schema = {"type": "object", "required": ["a"]}
    params = SamplingParams(json_schema=json.dumps(schema), presence_penalty=0.5, min_p=0.1)
    prompt = as_token_ids([1])
    async with server_of(constrained, offers=("json_schema", "penalties", "min_p")) as server:
        await server.start()
        assert (await server.generate(prompt, params, "r")).token_ids == [4]
        with pytest.raises(SamplingParamsError, match="begin with the request"):
            await server.generate(prompt, structs.replace(params, num_sampled=1), "r")
    async with server_of(constrained) as plain:
        await plain.start()
        with pytest.raises(SamplingParamsError, match="json_schema is"):
            await plain.generate(prompt, params, "r")
    body = next(body for body in bodies if body.get("stream"))
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert (body["presence_penalty"], body["min_p"]) == (0.5, 0.1)
    assert "frequency_penalty" not in body


# -- scores ------------------------------------------------------------------------------------------------------------


async def test_scores_of_agent_loop_serve_are_those_of_its_engine() -> None:
    vocab_size = len(small_tokenizer())
    text = as_token_ids(np.random.default_rng(0).integers(1, vocab_size, 40).tolist())
    direct = embedded()
    with serve_app([embedded()], max_model_len=256) as served:
        server = OpenAIServer(served.url)
        await server.start()
        assert Ability.SCORE in server.abilities
        for start, num_top in ((1, 0), (7, 3), (39, 2 * vocab_size), (40, 3)):
            expected = await direct.score(text, start=start, top_logprobs=num_top)
            scores = await server.score(text, start=start, top_logprobs=num_top)
            np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=1e-6)
            if num_top and start < 40:
                np.testing.assert_array_equal(np.asarray(scores.top_ids), np.asarray(expected.top_ids))
                np.testing.assert_allclose(
                    np.asarray(scores.top_logprobs), np.asarray(expected.top_logprobs), atol=1e-6
                )
        assert len((await server.score(as_token_ids([1] * 256))).logprobs) == 255
        with pytest.raises(BadPrompt, match="the text to score has 257 tokens, but the server takes 256"):
            await server.score(as_token_ids([1] * 257))
        with pytest.raises(BadPrompt, match="outside the vocabulary"):
            await server.score(as_token_ids([1, vocab_size]))
        await server.close()
        with pytest.raises(ServerError, match="closed"):
            await server.score(text)
        await direct.close()


def scoring(least_tokens: int) -> Handler:
    """Return a handler that scores as vLLM does, which samples at least `least_tokens` tokens."""

    async def respond(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" not in body:
            return web.json_response({"choices": [CHOICE]})
        if body["max_tokens"] < least_tokens:
            return refusal("too few tokens")
        if body["prompt_logprobs"] > 2:
            return refusal("at most 2")
        logprobs = {1: -3.0, 5: -0.25, 6: -2.0, 7: -9999.0}
        place = {token: {"logprob": logprob, "rank": 1} for token, logprob in logprobs.items()}
        num_places = 2 if 5 in body["prompt"] else len(body["prompt"]) - 1
        return web.json_response({"choices": [{"prompt_logprobs": [None, *[place] * num_places]}]})

    return respond


async def test_a_server_that_samples_one_token_scores_and_its_replies_are_checked() -> None:
    async with server_of(scoring(1)) as server:
        await server.start()
        scores = await server.score(as_token_ids([1, 5, 7]), top_logprobs=2)
        assert scores.logprobs.tolist() == [-0.25, -np.inf]
        assert np.asarray(scores.top_ids).tolist() == [[5, 6], [5, 6]]
        assert np.asarray(scores.top_logprobs).tolist() == [[-0.25, -2.0]] * 2
        with pytest.raises(BadPrompt, match="at most 2"):
            await server.score(as_token_ids([1, 5, 7]), top_logprobs=3)
        with pytest.raises(BadServerReply, match="3 entries for 2 tokens"):
            await server.score(as_token_ids([1, 5]))
        with pytest.raises(BadServerReply, match="KeyError"):
            await server.score(as_token_ids([1, 5, 8]))


async def test_a_server_that_wants_two_tokens_cannot_score() -> None:
    async with server_of(scoring(2)) as server:
        await server.start()
        assert Ability.SCORE not in server.abilities
        with pytest.raises(ServerError, match=r"max_tokens=1: .*too few tokens.*use agent-loop serve"):
            await server.score(as_token_ids([1, 5, 7]))
