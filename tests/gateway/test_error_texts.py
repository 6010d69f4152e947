"""Tests of the errors that programs get through the official clients: each says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.harness import ADD, MODEL, ProgramHarness, in_order
from tests.helpers import text_reply, user

TOOL = {"name": "add", "input_schema": {"type": "object"}}


def chat(**body: Any) -> Callable[..., Any]:
    return lambda openai, _: openai.chat.completions.create(**{"model": MODEL, "messages": user("?"), **body})


def response(**body: Any) -> Callable[..., Any]:
    return lambda openai, _: openai.responses.create(**{"model": MODEL, "input": "?", **body})


def message(**body: Any) -> Callable[..., Any]:
    return lambda _, anthropic: anthropic.messages.create(
        **{"model": MODEL, "max_tokens": 9, "messages": user("?"), **body}
    )


def extra(**body: Any) -> dict[str, Any]:
    return {"extra_body": body}


def named(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


@pytest.mark.parametrize(
    ("send", "words"),
    [
        (chat(**extra(temprature=1)), "did you mean 'temperature'? To ignore it, add temprature to accept_as_wish"),
        (chat(**extra(max_output_tokens=9)), "here it is max_completion_tokens"),
        (chat(tools=[{"type": "web_search"}]), "leave the tool out, or define a function that the client runs"),
        (chat(tools=[ADD], tool_choice=named("sub")), "not among the tools; they are add"),
        (chat(tool_choice="required"), "give tools, or leave it out"),
        (response(**extra(messages=[])), "here it is input"),
        (response(**extra(response_format={})), "here it is text.format"),
        (response(tools=[{"type": "web_search"}]), "add tools.web_search to accept_as_wish"),
        (message(**extra(response_format={})), "here it is output_config.format"),
        (message(**extra(stop=["a"])), "here it is stop_sequences"),
        (message(**extra(thread={"type": "create"})), "send the whole conversation, without thread"),
        (message(tools=[TOOL], tool_choice={"type": "tool", "name": "sub"}), "they are add"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_send_instead(send: Callable[..., Any], words: str) -> None:
    assert words in raised(send)


@pytest.mark.parametrize(
    "send",
    [
        lambda openai, _: openai.embeddings.create(model=MODEL, input="?"),
        lambda openai, _: openai.conversations.create(),
        lambda _, anthropic: anthropic.messages.batches.list(),
    ],
)
def test_an_unknown_path_is_answered_with_those_that_are_offered(send: Callable[..., Any]) -> None:
    text = raised(send)
    assert "there is no " in text
    assert all(path in text for path in ("/v1/chat/completions", "POST /v1/responses", "POST /v1/messages"))


def raised(send: Callable[..., Any]) -> str:
    """Return the message of the exception that a client raises for a request."""
    errors: list[str] = []

    async def program(
        row: Any, *, base_url: str, anthropic_base_url: str, api_key: str, http_client: Any
    ) -> None:
        how: Any = {"api_key": api_key, "http_client": http_client, "max_retries": 0}
        clients = (
            openai.AsyncOpenAI(base_url=base_url, **how),
            anthropic.AsyncAnthropic(base_url=anthropic_base_url, **how),
        )
        try:
            await send(*clients)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            errors.append(str(error))

    ProgramHarness(in_order(text_reply("x"))).run_virtual(program)
    [error] = errors
    return error
