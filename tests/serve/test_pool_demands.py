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
from tests.helpers import encoded, text_reply, user
from tests.serve.applications import MODEL, serve_app
from tests.serve.test_openai_client import client_of


class Sum(BaseModel):
    total: int


def scripted(*replies: ScriptedReply, abilities: Any = ()) -> ScriptedServer:
    waiting = list(replies)
    return ScriptedServer(
        lambda _: waiting.pop(0) if len(waiting) > 1 else waiting[0], streams=True, more_abilities=abilities
    )


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
