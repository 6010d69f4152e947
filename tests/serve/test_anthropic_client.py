"""The official Anthropic client against an application that really listens."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.helpers import text_reply, user
from tests.serve.applications import MODEL, ServedApp, SpellingServer, serve_app


def client_of(served: ServedApp, **options: Any) -> anthropic.Anthropic:
    base_url = served.url.removesuffix("/v1")
    return anthropic.Anthropic(**{"base_url": base_url, "api_key": "-", "max_retries": 0, **options})


def test_the_key_may_be_sent_as_either_client_sends_it() -> None:
    with serve_app([SpellingServer(text_reply("x"))], api_key="secret") as served:
        asked: Any = {"model": MODEL, "max_tokens": 8, "messages": user("?")}
        with client_of(served, api_key="secret") as client:
            assert client.messages.create(**asked).content[0].text == "x"
        with client_of(served, api_key=None, auth_token="secret") as client:
            assert client.messages.create(**asked).content[0].text == "x"
        with (
            client_of(served, api_key="other") as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(**asked)
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_an_unknown_model_and_an_unknown_field_are_refused_by_name() -> None:
    with serve_app([SpellingServer(text_reply("x"))]) as served, client_of(served) as client:
        with pytest.raises(anthropic.NotFoundError, match="claude"):
            client.messages.create(model="claude", max_tokens=8, messages=user("?"))
        with pytest.raises(anthropic.BadRequestError, match="unknown parameter 'colour'"):
            client.messages.create(model=MODEL, max_tokens=8, messages=user("?"), extra_body={"colour": 1})
        with pytest.raises(anthropic.BadRequestError, match="did you mean 'thinking'"):
            client.messages.create(model=MODEL, max_tokens=8, messages=user("?"), extra_body={"thinkin": 1})
