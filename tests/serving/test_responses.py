"""Tests of the OpenAI Responses API of `agent-loop serve` with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedServer
from tests.helpers import call_text, text_reply, user
from tests.serving.harness import MODEL, ServedApp, SpellingServer, serve_app

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


class JsonServer(SpellingServer):
    """Server that takes JSON schemas. Its replies are scripted all the same."""

    abilities = SpellingServer.abilities | {Ability.JSON_SCHEMA}


def client_of(served: ServedApp, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="any", max_retries=0, **options)


def prompt_of(server: ScriptedServer) -> list[int]:
    return server.requests[-1].prompt_ids.tolist()


def test_a_conversation_has_the_same_prompt_whole_and_streamed() -> None:
    server = SpellingServer(text_reply(call_text("add", a=1)), *[text_reply("Three.")] * 3)
    with serve_app([server]) as served, client_of(served) as client:
        asked: dict[str, Any] = {"model": MODEL, "tools": [ADD], "instructions": "Be brief."}
        first = client.responses.create(input="1 + 2?", **asked)
        [call] = first.output
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        second = client.responses.create(input=[*user("1 + 2?"), call, result], **asked)
        assert second.output_text == "Three."
        prompt = prompt_of(server)
        with client.responses.stream(input=[*user("1 + 2?"), call, result], **asked) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            assert "".join(deltas) == stream.get_final_response().output_text == "Three."
        assert len(deltas) > 1
        assert prompt_of(server) == prompt


def test_parse_constrains_the_text_and_returns_a_model() -> None:
    class Sum(BaseModel):
        value: int

    server = JsonServer(text_reply('{"value": 3}'))
    with serve_app([server]) as served, client_of(served) as client:
        response = client.responses.parse(model=MODEL, input="1 + 2?", text_format=Sum)
        assert response.output_parsed == Sum(value=3)
    assert '"value"' in server.requests[-1].sampling_params.json_schema


def test_a_client_that_disconnects_ends_its_response() -> None:
    server = SpellingServer(text_reply("one two three"), hangs=True)
    with serve_app([server]) as served, client_of(served) as client:
        stream = client.responses.create(model=MODEL, input="?", stream=True)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
        served.until(lambda: not served.pool.balancer.num_leases)


def test_requests_that_cannot_be_served_are_refused_by_name() -> None:
    with serve_app([SpellingServer(text_reply("x"))]) as served, client_of(served) as client:
        refused: list[tuple[dict[str, Any], str]] = [
            ({"tools": [{"type": "local_shell"}]}, "tools.local_shell"),
            ({"extra_body": {"conversation": "c"}}, "conversation"),
            ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
            ({"background": True}, "background"),
        ]
        for fields, param in refused:
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**{"model": MODEL, "input": "?", **fields})
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="other", input="?")


def test_tools_are_refused_if_the_models_format_of_calls_is_not_known() -> None:
    served_app = serve_app([SpellingServer(text_reply("x"))], why_no_tools="no format")
    with (
        served_app as served,
        client_of(served) as client,
        pytest.raises(openai.BadRequestError, match="no format"),
    ):
        client.responses.create(model=MODEL, input="?", tools=[ADD])
