"""Tests of chat and text completions: errors of requests, sessions, and the official client on a real application."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion

from agent_loop.errors import ChatTemplateError, RequestError, ServerDied, ServerError
from agent_loop.serve.chat import chat_completion
from agent_loop.serve.chat_requests import CompletionRequest
from agent_loop.servers.base import Ability
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.types import IntArray, SamplingParams, as_token_ids
from tests.helpers import (
    call_text,
    encoded,
    hermes_template,
    small_tokenizer,
    text_reply,
    tool_call_reply,
    user,
)
from tests.serve.applications import MODEL, ServedApp, SpellingServer, embedded, serve_app
from tests.serve.harness import ADD

pytestmark = pytest.mark.virtual_time

TEMPLATE = hermes_template()


async def chat(sampler: Any, **fields: Any) -> Any:
    body = {"model": "any", "messages": user("hi"), **fields}
    return await chat_completion(body, template=TEMPLATE, sampler=sampler)


# -- errors of requests ------------------------------------------------------------------------------------------------


def one(message: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [message]}


def calling(function: dict[str, Any]) -> dict[str, Any]:
    return one({"role": "assistant", "tool_calls": [{"function": function}]})


def with_part(**part: Any) -> dict[str, Any]:
    return one({"role": "user", "content": [part]})


NOT_A_DICT = {"role": "user", "content": [3]}
BAD_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}
UNKNOWN_TOOL = {"type": "function", "function": {"name": "subtract"}}


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"stop": ["a"] * 17}, "at most 16 items", "stop"),
        ({"stop": ["a", ""]}, "at least 1 character", "stop[1]"),
        ({"stop": 3, "stop_token_ids": [-1]}, "valid string", "stop"),
        ({"stop_token_ids": [-1]}, "", "stop_token_ids[0]"),
        ({"messages": [*user("x"), NOT_A_DICT]}, "valid dictionary", "messages[1].content[0]"),
        ({"messages": [{"role": "me"}, NOT_A_DICT]}, "input should be", "messages[0].role"),
        ({"max-tokens": 3}, "unknown parameter 'max-tokens'; did you mean 'max_tokens'", "max-tokens"),
        (one({**user("x")[0], "x-id": 1}), "unknown parameter 'messages[0].x-id'", "messages[0].x-id"),
        ({"presence_penalty": 2.5}, "", "presence_penalty"),
        ({"response_format": {"type": "json_object"}, "tools": [ADD]}, "", "response_format"),
        ({"top_logprobs": 3}, "", "top_logprobs"),
        ({"tool_choice": "required"}, "", "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "custom"}}, "", "tool_choice"),
        ({"tools": [ADD], "tool_choice": UNKNOWN_TOOL}, "", "tool_choice"),
        ({"n": 1000}, "", "n"),
        ({"temperature": -1}, "", "temperature"),
        ({"tools": [BAD_SCHEMA]}, "", "tools[0]"),
        (
            with_part(type="image_url", image_url={"url": "/etc/hostname"}),
            "",
            "messages[0].content[0].image_url.url",
        ),
        (with_part(type="input_audio"), "messages[0].content[0]: type input_audio", None),
        (one({**user("x")[0], "tool_calls": [{"id": "1"}]}), "only assistant messages may have tool", None),
        (
            calling({"name": "f", "arguments": "{"}),
            "tool_calls[0].function.arguments is not valid JSON",
            None,
        ),
        (calling({"name": "f", "arguments": "[]"}), "JSON object", None),
        (
            one({"role": "assistant", "tool_calls": [{}]}),
            "messages[0].tool_calls[0] is not a function call with a name",
            None,
        ),
    ],
)
async def test_an_invalid_chat_request_names_the_field(fields: Any, words: str, param: str | None) -> None:
    server = ScriptedServer([text_reply("Yes.")])
    with pytest.raises(RequestError) as caught:
        await chat(server, **fields)
    assert words in str(caught.value)
    assert param is None or caught.value.param == param
    assert not server.requests


@pytest.mark.parametrize(
    ("prompt", "param"), [([1, -1], "prompt[1]"), ([], "prompt"), ([[1], []], "prompt[1]"), (3, "prompt")]
)
def test_an_invalid_prompt_gets_the_error_of_the_best_fitting_type(prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        CompletionRequest.read({"model": "m", "prompt": prompt})
    assert caught.value.param == param


async def test_a_conversation_that_the_template_refuses_is_an_error_of_the_template() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(ChatTemplateError, match="no processor"):
        await chat(ScriptedServer([text_reply("Yes.")]), **with_part(**image))


# -- servers and pools -------------------------------------------------------------------------------------------------


async def test_a_server_and_a_pool_return_the_same_completion() -> None:
    server = ScriptedServer([tool_call_reply("add", a=1)])
    for who in (server, AsyncLLMServerManager([server])):
        reply = await chat(who, tools=[ADD])
        assert ChatCompletion.model_validate(reply).choices[0].finish_reason == "tool_calls"
        assert server.num_sessions == 0


async def test_the_callers_session_stays_open_and_other_sessions_end() -> None:
    server = ScriptedServer(lambda _: text_reply("Yes."))
    manager = AsyncLLMServerManager([server])
    reply = await chat(manager, session_id="mine", n=3)
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["Yes."] * 3
    assert (server.num_sessions, manager.pool.balancer.num_sessions) == (1, 1)
    manager.end_session("mine")
    assert (server.num_sessions, manager.pool.balancer.num_sessions) == (0, 0)


async def test_one_of_several_that_fails_fails_the_request_and_frees_the_others() -> None:
    def script(_: object) -> ScriptedReply:
        is_second = len(server.requests) == 2
        return ScriptedReply([5], error="broken") if is_second else text_reply("a", latency_s=math.inf)

    server = ScriptedServer(script)
    manager = AsyncLLMServerManager([server])
    with pytest.raises(ServerError, match="broken"):
        await chat(manager, n=3)
    assert (manager.pool.balancer.num_leases, server.num_running) == (0, 0)


async def test_an_aborted_completion_is_an_error() -> None:
    server = ScriptedServer([text_reply("one two", latency_s=10)])
    task = asyncio.ensure_future(chat(server, session_id="mine"))
    await asyncio.sleep(1)
    await server.abort("mine")
    with pytest.raises(ServerError, match="aborted"):
        await task


@pytest.mark.parametrize(
    ("sampled", "content"),
    [
        ("Yes.<|endoftext|>", "Yes."),
        ("Yes.<|im_end|>", "Yes."),
        ("A <|im_start|> B<|im_end|>", "A <|im_start|> B"),
    ],
)
async def test_a_special_token_that_stops_the_model_is_not_shown_and_others_are(
    sampled: str, content: str
) -> None:
    reply = await chat(ScriptedServer([ScriptedReply(encoded(sampled))]))
    assert reply["choices"][0]["message"]["content"] == content


# -- the official client -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[ServedApp]:
    with serve_app([embedded("embedded-0"), embedded("embedded-1")], max_model_len=256) as served:
        yield served


def client_of(served: ServedApp) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="-", max_retries=0)


def test_a_stream_with_tools_sends_text_immediately_and_calls_whole() -> None:
    text = f"<think>\nHm.\n</think>\nLet me add: {call_text('add', a=1)}\n{call_text('add', a=2)}"
    asked: Any = {"model": MODEL, "messages": user("?"), "tools": [ADD]}
    with serve_app([SpellingServer(text_reply(text))]) as served, client_of(served) as client:
        whole = client.chat.completions.create(**asked)
        options: Any = {"include_usage": True}
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.usage]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    texts = [delta.content for delta in deltas if delta.content]
    assert len(texts) > 3
    assert "".join(texts) == whole.choices[0].message.content == "Let me add:"
    assert "".join(delta.model_extra.get("reasoning_content", "") for delta in deltas) == "Hm."
    written = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in written] == [
        (0, "add", '{"a": 1}'),
        (1, "add", '{"a": 2}'),
    ]
    assert len({call.id for call in written}) == 2
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_completion_before_it_and_the_request_with_it(stream: bool) -> None:
    server = SpellingServer(text_reply("one two three four"), hangs=True)
    with serve_app([server]) as served, client_of(served) as client:
        reply = client.chat.completions.create(
            model=MODEL, messages=user("?"), stop=[" three", "five"], stream=stream
        )
        choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
        said = [choice.delta if stream else choice.message for choice in choices]
        assert "".join(each.content or "" for each in said) == "one two"
        assert choices[-1].finish_reason == "stop"
        served.until(lambda: server.num_running == 0)


def test_token_ids_are_exactly_those_of_the_engine(real: ServedApp) -> None:
    prompt = encoded("the quick brown fox")
    params = SamplingParams(seed=7, max_tokens=24, temperature=0.8, top_k=50, ignore_eos=True)
    expected = real.run(real.manager.pool.servers[0].generate(as_token_ids(prompt), params, "direct"))
    extra = {"return_token_ids": True, "top_k": 50, "ignore_eos": True}
    asked: Any = {"prompt": prompt, "max_tokens": 24, "seed": 7, "temperature": 0.8, "logprobs": 0}
    with client_of(real) as client:
        create = client.completions.create
        whole = create(model=MODEL, **asked, extra_body=extra).choices[0]
        parts = [part.choices[0] for part in create(model=MODEL, **asked, stream=True, extra_body=extra)]
    assert whole.model_extra["token_ids"] == expected.token_ids
    assert whole.model_extra["prompt_token_ids"] == prompt
    assert whole.logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=1e-4)
    assert [token for part in parts for token in part.model_extra["token_ids"]] == expected.token_ids
    assert "".join(part.text for part in parts) == whole.text
    assert len(parts) > 20
    assert parts[-1].finish_reason == whole.finish_reason == "length"


WITHOUT_EFFECT: dict[str, Any] = {
    "user": "me",
    "store": False,
    "metadata": {"a": "b"},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "top_logprobs": 0,
}


def test_several_prompts_and_several_choices_and_parameters_without_effect(real: ServedApp) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 4}
    with client_of(real) as client:
        create = client.completions.create
        several = create(prompt=["one", "two"], n=2, seed=5, **asked)
        single = create(prompt="two", seed=6, **asked)
        texts = ["", "", "", ""]
        for part in create(prompt=["one", "two"], n=2, seed=5, stream=True, **asked):
            texts[part.choices[0].index] += part.choices[0].text
        chat = client.chat.completions.create(messages=user("hi"), n=3, **asked, **WITHOUT_EFFECT)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[3].text == single.choices[0].text
    assert texts == [choice.text for choice in several.choices]
    assert several.usage.completion_tokens <= 16
    assert [choice.index for choice in chat.choices] == [0, 1, 2]


def test_models_are_listed_and_others_are_not_found(real: ServedApp) -> None:
    with client_of(real) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).model_extra["max_model_len"] == 256
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            client.models.retrieve("gpt")
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt", messages=user("hi"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": user("word " * 400)}, None),
        ({"temperature": 1e-9}, None),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, None),
        ({"n": 1000}, "n"),
    ],
)
def test_what_is_refused_is_a_bad_request(real: ServedApp, fields: Any, param: str | None) -> None:
    with client_of(real) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": user("hi"), "max_tokens": 1, **fields})
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


def test_candidates_are_returned_and_the_bytes_of_tokens_are_those_of_the_text() -> None:
    text = "a \N{GRINNING FACE} é"
    ids = encoded(f"{text}<|im_end|>")
    assert len(ids) > len(text)  # characters have several tokens
    tops = {
        "top_token_ids": np.array([[token, 20] for token in ids], np.int32),
        "top_logprobs": np.array([[-0.5, -2.0] for _ in ids], np.float32),
    }
    reply = ScriptedReply(ids, extras=tops)
    server = ScriptedServer(lambda _: reply, streams=True, more_abilities=[Ability.TOP_LOGPROBS])
    asked: Any = {"model": MODEL, "messages": user("?"), "logprobs": True}
    with serve_app([server]) as served, client_of(served) as client:
        plain = client.chat.completions.create(**asked).choices[0].logprobs.content
        chat = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content
        completion = client.completions.create(model=MODEL, prompt="?", logprobs=2, max_tokens=64)
    assert b"".join(bytes(token.bytes) for token in plain).decode().removesuffix("<|im_end|>") == text
    assert [[top.logprob for top in token.top_logprobs] for token in chat] == [[-0.5, -2.0]] * len(ids)
    assert chat[0].top_logprobs[0].token == chat[0].token
    candidates = completion.choices[0].logprobs.top_logprobs
    assert [set(top.values()) for top in candidates] == [{-0.5, -2.0}] * len(ids)
    assert [r.sampling_params.top_logprobs for r in server.requests] == [0, 2, 2]


# -- log-probs of prompts ----------------------------------------------------------------------------------------------


def score(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    body = {"prompt_logprobs": 1, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, extra_body=body)


def test_prompts_of_text_and_of_token_ids_have_the_same_log_probs(real: ServedApp) -> None:
    ids = small_tokenizer().encode("say hello")
    with client_of(real) as client:
        several = score(client, ["say hello", "hello"])
        one = score(client, ids)
    assert len(several.choices) == 2
    first, *places = one.choices[0].prompt_logprobs
    assert first is None
    for place, other in zip(places, several.choices[0].prompt_logprobs[1:], strict=True):
        assert place.keys() == other.keys()
        logprobs = [other[token]["logprob"] for token in place]
        assert [place[token]["logprob"] for token in place] == pytest.approx(logprobs, abs=1e-5)
    assert [str(token) in place for token, place in zip(ids[1:], places, strict=True)] == [True] * len(places)
    assert {len(place) for place in places} <= {1, 2}, "the token itself and the likeliest one"
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(ids), 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 2}, "set max_tokens to 0"),
        ({"extra_body": {}}, "give at least 1, or prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"prompt": [1] * 257}, "has 257 tokens"),
    ],
)
def test_scores_that_cannot_be_given_say_why(real: ServedApp, fields: Any, message: str) -> None:
    asked = {"prompt": [1, 2], "max_tokens": 0, "extra_body": {"prompt_logprobs": 1}, **fields}
    with client_of(real) as client, pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model=MODEL, **asked)


def test_servers_that_cannot_score_say_so() -> None:
    with (
        serve_app([SpellingServer()]) as served,
        client_of(served) as client,
        pytest.raises(openai.APIStatusError, match="no server can score the tokens of a text"),
    ):
        score(client, [1, 2])


async def test_texts_are_spread_over_the_servers_and_another_one_replaces_a_dead_one() -> None:
    def half(token_ids: IntArray) -> list[float]:
        return [math.log(0.5)] * (len(token_ids) - 1)

    first, second = (ScriptedServer([], name=name, scorer=half) for name in ("a", "b"))
    plain = ScriptedServer([], name="c")
    manager = AsyncLLMServerManager([plain, first, second])
    first.die()
    scores = await manager.score([1, 2, 3], start=2)
    assert scores.logprobs.tolist() == [np.float32(math.log(0.5))]
    assert [len(server.scored) for server in (plain, first, second)] == [0, 0, 1]
    second.die()
    with pytest.raises(ServerDied):
        await manager.score([1, 2, 3])
