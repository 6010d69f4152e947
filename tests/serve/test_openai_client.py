"""The official client against an application that really listens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest

from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.types import SamplingParams, as_token_ids
from tests.helpers import call_text, encoded, text_reply, user
from tests.serve.applications import MODEL, ServedApp, SpellingServer, embedded, serve_app

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def real() -> Iterator[ServedApp]:
    with serve_app([embedded("embedded-0"), embedded("embedded-1")], max_model_len=256) as served:
        yield served


def client_of(served: ServedApp, **options) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": served.url, "api_key": "-", "max_retries": 0, **options})


def test_a_stream_with_tools_sends_text_immediately_and_calls_whole() -> None:
    text = f"<think>\nHm.\n</think>\nLet me add: {call_text('add', a=1)}\n{call_text('add', a=2)}"
    with serve_app([SpellingServer(text_reply(text))]) as served, client_of(served) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=user("?"),
            tools=[ADD],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    texts = [delta.content for delta in deltas if delta.content]
    assert len(texts) > 3
    assert "".join(texts) == "Let me add:"
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
        text = "".join(
            (choice.delta.content if stream else choice.message.content) or "" for choice in choices
        )
        assert (text, choices[-1].finish_reason) == ("one two", "stop")
        served.until(lambda: server.num_running == 0)


def test_token_ids_are_exactly_those_of_the_engine(real: ServedApp) -> None:
    prompt = encoded("the quick brown fox")
    params = SamplingParams(seed=7, max_tokens=24, temperature=0.8, top_k=50, ignore_eos=True)
    expected = real.run(real.manager.pool.servers[0].generate(as_token_ids(prompt), params, "direct"))
    extra = {"return_token_ids": True, "top_k": 50, "ignore_eos": True}
    with client_of(real) as client:
        asked = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 24,
            "seed": 7,
            "temperature": 0.8,
            "logprobs": 0,
        }
        whole = client.completions.create(**asked, extra_body=extra).choices[0]
        parts = [
            part.choices[0] for part in client.completions.create(**asked, stream=True, extra_body=extra)
        ]
    assert whole.model_extra["token_ids"] == expected.token_ids
    assert whole.model_extra["prompt_token_ids"] == prompt
    assert whole.logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=1e-4)
    assert [token for part in parts for token in part.model_extra["token_ids"]] == expected.token_ids
    assert "".join(part.text for part in parts) == whole.text
    assert len(parts) > 20
    assert parts[-1].finish_reason == whole.finish_reason == "length"


def test_several_prompts_and_several_choices(real: ServedApp) -> None:
    with client_of(real) as client:
        several = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=4, seed=5)
        single = client.completions.create(model=MODEL, prompt="two", max_tokens=4, seed=6)
        stream = client.completions.create(
            model=MODEL, prompt=["one", "two"], n=2, max_tokens=4, seed=5, stream=True
        )
        texts = ["", "", "", ""]
        for part in stream:
            texts[part.choices[0].index] += part.choices[0].text
        chat = client.chat.completions.create(model=MODEL, messages=user("hi"), n=3, max_tokens=4)
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
    ("options", "param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}, "tools": [ADD]}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "custom"}}, "tool_choice"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "subtract"}}},
            "tool_choice",
        ),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, None),
        ({"n": 1000}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]}, "tools[0]"),
        ({"messages": [{"role": "oracle", "content": "hi"}]}, "messages[0].role"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "/etc/hostname"}}],
                    }
                ]
            },
            "messages[0].content[0].image_url.url",
        ),
        ({"messages": user("word " * 400)}, None),
        ({"temperature": 1e-9}, None),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    real: ServedApp, options: dict, param: str | None
) -> None:
    with client_of(real) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": user("hi"), "max_tokens": 1, **options})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_parameters_without_effect_are_accepted(real: ServedApp) -> None:
    with client_of(real) as client:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=user("hi"),
            max_tokens=2,
            user="me",
            store=False,
            metadata={"a": "b"},
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias={},
            response_format={"type": "text"},
            top_logprobs=0,
        )
    assert reply.usage.completion_tokens <= 2


def test_candidates_are_returned_and_the_bytes_of_tokens_are_those_of_the_text() -> None:
    text = "a \N{GRINNING FACE} é"
    ids = encoded(f"{text}<|im_end|>")
    assert len(ids) > len(text)  # characters have several tokens
    tops = {
        "top_token_ids": np.array([[token, 20] for token in ids], np.int32),
        "top_logprobs": np.array([[-0.5, -2.0] for _ in ids], np.float32),
    }
    server = ScriptedServer(
        lambda _: ScriptedReply(ids, extras=tops), streams=True, more_abilities=[Ability.TOP_LOGPROBS]
    )
    with serve_app([server]) as served, client_of(served) as client:
        chat = client.chat.completions.create(model=MODEL, messages=user("?"), logprobs=True)
        completion = client.completions.create(model=MODEL, prompt="?", logprobs=2, max_tokens=64)
    parts = [bytes(token.bytes) for token in chat.choices[0].logprobs.content]
    assert b"".join(parts).decode().removesuffix("<|im_end|>") == text
    candidates = completion.choices[0].logprobs.top_logprobs
    assert [set(top.values()) for top in candidates] == [{-0.5, -2.0}] * len(ids)
    assert [r.sampling_params.top_logprobs for r in server.requests] == [0, 2]
