"""Tests of what requests to `agent-loop serve` demand of a completion, with the official client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from tests.gateway.harness import ADD
from tests.helpers import call_text, encoded, hermes_template, text_reply, user
from tests.serving.harness import MODEL, serve_app
from tests.serving.test_openai_client import client_of

NAMED = {"type": "function", "function": {"name": "add"}}
OPENED = '<tool_call>\n{"name": "add", "arguments":'


class Sum(BaseModel):
    total: int


def scripted(*replies: ScriptedReply, abilities: Any = ()) -> ScriptedServer:
    waiting = list(replies)
    return ScriptedServer(
        lambda _: waiting.pop(0) if len(waiting) > 1 else waiting[0], streams=True, more_abilities=abilities
    )


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_forced_call_is_returned_as_any_call(choice: Any, is_streamed: bool) -> None:
    server = scripted(text_reply(call_text("add", a=1, b=2).removeprefix(OPENED)))
    with serve_app([server]) as served, client_of(served) as client:
        create = client.chat.completions.create
        asked: Any = {"model": MODEL, "messages": user("?"), "tools": [ADD], "tool_choice": choice}
        if is_streamed:
            deltas = [chunk.choices[0].delta for chunk in create(**asked, stream=True)]
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
        else:
            reply = create(**asked)
            assert reply.choices[0].finish_reason == "tool_calls"
            calls = reply.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}]
    assert hermes_template().decode(server.requests[0].prompt_ids).endswith(OPENED)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_without_parallel_calls_a_completion_ends_after_its_first_call(is_streamed: bool) -> None:
    first = call_text("add", a=1)
    server = scripted(text_reply(f"{first}{call_text('add', a=2)}"))
    with serve_app([server]) as served, client_of(served) as client:
        asked: Any = {"model": MODEL, "messages": user("?"), "tools": [ADD], "parallel_tool_calls": False}
        body = {"return_token_ids": True}
        if is_streamed:
            chunks = list(client.chat.completions.create(**asked, extra_body=body, stream=True))
            ids = [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        else:
            choice = client.chat.completions.create(**asked, extra_body=body).choices[0]
            ids, calls = choice.token_ids, choice.message.tool_calls
    assert ids == encoded(first)
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}]


def test_json_is_passed_to_servers_that_can_constrain_completions_and_refused_by_others() -> None:
    able = scripted(text_reply('{"total": 3}'), abilities=[Ability.JSON_SCHEMA])
    with serve_app([able]) as served, client_of(served) as client:
        parsed = client.chat.completions.parse(model=MODEL, messages=user("?"), response_format=Sum)
        assert parsed.choices[0].message.parsed == Sum(total=3)
    schema = json.loads(able.requests[0].sampling_params.json_schema)
    assert schema["required"] == ["total"]
    unable = scripted(text_reply("x"))
    with (
        serve_app([unable]) as served,
        client_of(served) as client,
        pytest.raises(openai.BadRequestError, match="json_schema"),
    ):
        client.chat.completions.create(
            model=MODEL, messages=user("?"), response_format={"type": "json_object"}
        )
    assert not unable.requests


def test_the_bytes_of_tokens_are_those_of_the_text_also_of_parts_of_a_character() -> None:
    text = "a \N{GRINNING FACE} é"
    ids = encoded(f"{text}<|im_end|>")
    assert len(ids) > len(text)  # characters have several tokens
    server = scripted(ScriptedReply(ids))
    with serve_app([server]) as served, client_of(served) as client:
        chat = client.chat.completions.create(model=MODEL, messages=user("?"), logprobs=True)
    parts = [bytes(token.bytes) for token in chat.choices[0].logprobs.content]
    assert b"".join(parts).decode().removesuffix("<|im_end|>") == text


def test_candidates_are_returned_by_both_apis() -> None:
    ids = encoded("hi<|im_end|>")
    tops = {
        "top_token_ids": np.array([[token, 20] for token in ids], np.int32),
        "top_logprobs": np.array([[-0.5, -2.0] for _ in ids], np.float32),
    }
    server = scripted(ScriptedReply(ids, extras=tops), abilities=[Ability.TOP_LOGPROBS])
    with serve_app([server]) as served, client_of(served) as client:
        chat = client.chat.completions.create(model=MODEL, messages=user("?"), logprobs=True, top_logprobs=2)
        content = chat.choices[0].logprobs.content
        assert [[top.logprob for top in token.top_logprobs] for token in content] == [[-0.5, -2.0]] * len(ids)
        text = client.completions.create(model=MODEL, prompt="?", logprobs=2)
        tokens = text.choices[0].logprobs
        assert [set(top.values()) for top in tokens.top_logprobs] == [{-0.5, -2.0}] * len(ids)
    assert [r.sampling_params.top_logprobs for r in server.requests] == [2, 2]


def test_reasoning_effort_and_variables_that_the_template_does_not_know_change_nothing() -> None:
    server = scripted(text_reply("x"))
    with serve_app([server]) as served, client_of(served) as client:
        create = client.chat.completions.create
        create(model=MODEL, messages=user("?"))
        create(model=MODEL, messages=user("?"), reasoning_effort="low")
        create(
            model=MODEL,
            messages=user("?"),
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    assert len({tuple(request.prompt_ids.tolist()) for request in server.requests}) == 1
