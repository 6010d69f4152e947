"""Tests of the OpenAI Responses API of `agent-loop serve` with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.helpers import text_reply
from tests.serving.harness import MODEL, ServedApp, SpellingServer, serve_app

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def client_of(served: ServedApp, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="any", max_retries=0, **options)


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
