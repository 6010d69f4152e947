"""Tests of the client of OpenAI-compatible servers, with the application of `agent-loop serve` on a local port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
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
    WeightsError,
)
from agent_loop.servers.base import Ability
from agent_loop.servers.factory import create_servers
from agent_loop.servers.openai_compatible import OpenAIOptions, OpenAIServer
from agent_loop.types import SamplingParams, as_token_ids
from tests.helpers import small_tokenizer
from tests.serve.applications import MODEL, embedded, serve_app, tiny_lm
from tests.servers.test_http import engine, events


@pytest.mark.slow
def test_the_client_of_agent_loop_serve_passes_the_server_checks() -> None:
    with serve_app([embedded()]) as served:
        server = OpenAIServer(served.url, options=OpenAIOptions(logprobs="scaled"))

        async def main() -> None:
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

        asyncio.run(main())


def test_each_url_of_a_configuration_becomes_a_server() -> None:
    rollout = RolloutConfig(engine="openai", server_urls=["http://a:1", "http://b:2/v1"])
    servers = create_servers(ModelConfig(), rollout=rollout)
    assert [server.name for server in servers] == ["openai-0", "openai-1"]
    with pytest.raises(ConfigError, match=r"server_urls is empty; set URLs for one of openai, sglang, vllm"):
        create_servers(ModelConfig(), rollout=RolloutConfig(engine="openai"))
    with pytest.raises(ConfigError, match=r"this engine is not reached by a URL"):
        create_servers(ModelConfig(), rollout=RolloutConfig(engine="embedded", server_urls=["http://a:1"]))
    with pytest.raises(ConfigError, match="logprob"):
        create_servers(
            ModelConfig(),
            rollout=RolloutConfig(engine="openai", server_urls=["http://a:1"], engine_kwargs={"logprob": 1}),
        )


def test_a_server_that_returns_no_token_ids_is_refused() -> None:
    async def no_ids(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": MODEL}]})
        return web.json_response({"choices": [{"text": "x", "finish_reason": "length"}]})

    assert isinstance(error_of_start(no_ids), ConfigError)
    assert "does not return token_ids" in str(error_of_start(no_ids))


def test_a_server_without_the_served_model_name_is_refused() -> None:
    async def other(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "other"}]})

    assert "serves other, not 'mine'" in str(error_of_start(other, served_model_name="mine"))


def test_a_missing_api_key_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="'NO_SUCH_KEY', but that variable is not set"):
        OpenAIServer("http://a:1", options=OpenAIOptions(api_key_env="NO_SUCH_KEY"))


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (['data: {"choices": [{"token_ids": [1], "finish_reason": "because"}]}\n\n'], BadServerReply),
        (['data: {"choices": 3}\n\n'], BadServerReply),
        (['data: {"choices": [{"token_ids": [1]}]}\n\n', "data: [DONE]\n\n"], BadServerReply),
        (['data: {"error": {"message": "no memory"}}\n\n'], Exception),
    ],
)
def test_an_invalid_event_raises_an_error_that_names_server_and_request(
    lines: list[str], error: type[Exception]
) -> None:
    async def garbage(request: web.Request) -> web.StreamResponse:
        return await events(request, *lines)

    with pytest.raises(error, match="server openai-0 request r"):
        raise error_of_generate(garbage)


def test_a_rejected_prompt_a_dead_server_and_a_weight_update_raise_different_errors() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async def die(request: web.Request) -> web.StreamResponse:
        response = await events(request, 'data: {"choices": [{"token_ids": [1]}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    assert isinstance(error_of_generate(refuse), BadPrompt)
    assert isinstance(error_of_generate(die), ServerDied)
    server = OpenAIServer("http://a:1")
    server._trouble = ""
    with pytest.raises(WeightsError, match="accepts no weights"):
        asyncio.run(server.update_weights([], weight_version=1))


async def test_schemas_and_penalties_are_sent_to_a_server_that_offers_them_and_refused_for_others() -> None:
    bodies: list[dict[str, Any]] = []

    async def constrained(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": MODEL}]})
        bodies.append(await request.json())
        choice = {"token_ids": [4], "finish_reason": "stop"}
        if not bodies[-1].get("stream"):
            return web.json_response({"choices": [choice]})
        return await events(request, f"data: {json.dumps({'choices': [choice]})}\n\n")

    schema = {"type": "object", "required": ["a"]}
    params = SamplingParams(json_schema=json.dumps(schema), presence_penalty=0.5, min_p=0.1)

    async with engine(constrained) as client:
        options = OpenAIOptions(offers=("json_schema", "penalties", "min_p"))
        server = OpenAIServer(client.url, options=options)
        await server.start()
        assert (await server.generate(as_token_ids([1]), params, "r")).token_ids == [4]
        with pytest.raises(SamplingParamsError, match="begin with the request"):
            await server.generate(as_token_ids([1, 2]), structs.replace(params, num_sampled=1), "r")
        await server.close()
        plain = OpenAIServer(client.url)
        await plain.start()
        with pytest.raises(SamplingParamsError, match="json_schema is"):
            await plain.generate(as_token_ids([1]), params, "r")
        await plain.close()
    body = next(body for body in bodies if body.get("stream"))
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert (body["presence_penalty"], body["min_p"]) == (0.5, 0.1)
    assert "frequency_penalty" not in body


def test_scores_of_agent_loop_serve_are_those_of_its_engine() -> None:
    vocab_size = len(small_tokenizer())
    text = as_token_ids(np.random.default_rng(0).integers(1, vocab_size, 40).tolist())

    async def main() -> None:
        direct = embedded()
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

    with serve_app([embedded()], max_model_len=256) as served:
        asyncio.run(main())


@pytest.mark.parametrize("least_tokens", [1, 2])
def test_a_server_scores_with_one_sampled_token_or_says_what_it_answered(least_tokens: int) -> None:
    """vLLM samples at least one token. A server that wants two tokens is taken as one that cannot score."""

    async def vllm(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": MODEL}]})
        body = await request.json()
        if "prompt_logprobs" not in body:
            return web.json_response({"choices": [{"token_ids": [4], "finish_reason": "stop"}]})
        if body["max_tokens"] < least_tokens:
            return web.json_response({"error": {"message": "too few tokens"}}, status=400)
        if body["prompt_logprobs"] > 2:
            return web.json_response({"error": {"message": "at most 2"}}, status=400)
        logprobs = {1: -3.0, 5: -0.25, 6: -2.0, 7: -9999.0}
        place = {token: {"logprob": logprob, "rank": 1} for token, logprob in logprobs.items()}
        num_places = 2 if 5 in body["prompt"] else len(body["prompt"]) - 1
        return web.json_response({"choices": [{"prompt_logprobs": [None, *[place] * num_places]}]})

    async def main() -> None:
        async with engine(vllm) as client:
            server = OpenAIServer(client.url)
            await server.start()
            if least_tokens == 2:
                assert Ability.SCORE not in server.abilities
                with pytest.raises(
                    ServerError, match=r"max_tokens=1: .*too few tokens.*use agent-loop serve"
                ):
                    await server.score(as_token_ids([1, 5, 7]))
                await server.close()
                return
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
            await server.close()

    asyncio.run(main())


def test_a_server_that_rejects_schemas_cannot_offer_them() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": MODEL}]})
        if "response_format" in await request.json():
            return web.json_response({"error": {"message": "no grammar"}}, status=400)
        return web.json_response({"choices": [{"token_ids": [4], "finish_reason": "stop"}]})

    error = error_of_start(refuse, offers=("json_schema",))
    assert isinstance(error, ConfigError)
    assert "remove json_schema from rollout.engine_kwargs.offers" in str(error)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_of_start(handler: Handler, **options: Any) -> Exception:
    """Return the error that `start` raises."""

    async def main() -> Exception:
        async with engine(handler) as client:
            server = OpenAIServer(client.url, options=OpenAIOptions(**options))
            try:
                await server.start()
            except Exception as error:
                return error
            finally:
                await server.close()
        raise AssertionError("start raised no error")

    return asyncio.run(main())


def error_of_generate(handler: Handler) -> Exception:
    """Return the error that `generate` raises."""

    async def main() -> Exception:
        async with engine(handler) as client:
            server = OpenAIServer(client.url)
            server._trouble = ""
            try:
                await server.generate(as_token_ids([1, 2]), SamplingParams(), "r")
            except Exception as error:
                return error
            finally:
                await server.close()
        raise AssertionError("generate raised no error")

    return asyncio.run(main())
