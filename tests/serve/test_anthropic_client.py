"""The official Anthropic client against an application that really listens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.helpers import encoded, hermes_template, small_tokenizer, text_reply, user
from tests.serve.applications import MODEL, ServedApp, SpellingServer, embedded, serve_app

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    small_tokenizer().save_pretrained(folder)
    server = embedded(tokenizer_path=folder, max_model_len=2048)
    with serve_app([server], max_model_len=2048) as served:
        yield served


def client_of(served: ServedApp, **options: Any) -> anthropic.Anthropic:
    base_url = served.url.removesuffix("/v1")
    return anthropic.Anthropic(**{"base_url": base_url, "api_key": "-", "max_retries": 0, **options})


def test_a_prefill_is_continued_exactly() -> None:
    server = SpellingServer(text_reply(" 3, of course."))
    with serve_app([server]) as served, client_of(served) as client:
        asked: Any = {
            "model": MODEL,
            "messages": [*user("1 + 2?"), {"role": "assistant", "content": "It is"}],
        }
        count = client.messages.count_tokens(**asked)
        reply = client.messages.create(max_tokens=64, **asked)
    prompt = server.requests[0].prompt_ids.tolist()
    assert hermes_template().decode(prompt).endswith("<|im_start|>assistant\nIt is")
    assert prompt == [*hermes_template().open(user("1 + 2?")).tolist(), *encoded("It is")]
    assert count.input_tokens == len(prompt)
    assert reply.content[0].text == " 3, of course."


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


class Answer(pydantic.BaseModel):
    """Answer in a fixed form."""

    kind: Literal["number", "word"]
    is_sure: bool


def test_an_answer_is_parsed_into_a_model(real: ServedApp) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 1024,
        "messages": user("1 + 2?"),
        "output_format": Answer,
        "extra_body": {"temperature": 100},  # a random model would otherwise write white space without end
    }
    with client_of(real) as client:
        parsed = client.messages.parse(**asked)
        beta = client.beta.messages.parse(**asked)
    assert isinstance(parsed.parsed_output, Answer)
    assert isinstance(beta.parsed_output, Answer)
