"""Tests of error messages for invalid requests."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.errors import RequestError
from agent_loop.serve.chat_requests import ChatCompletionRequest, CompletionRequest

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"stop": ["a"] * 17}, "at most 16 items", "stop"),
        ({"stop": ["a", ""]}, "at least 1 character", "stop[1]"),
        ({"stop": 3}, "valid string", "stop"),
        (
            {"messages": [HELLO, {"role": "user", "content": [3]}]},
            "valid dictionary",
            "messages[1].content[0]",
        ),
        (
            {"messages": [{"role": "me"}, {"role": "user", "content": [3]}]},
            "input should be",
            "messages[0].role",
        ),
        ({"stop": 3, "stop_token_ids": [-1]}, "valid string", "stop"),
        ({"max-tokens": 3}, "unknown parameter 'max-tokens'; did you mean 'max_tokens'", "max-tokens"),
        ({"messages": [{**HELLO, "x-id": 1}]}, "unknown parameter 'messages[0].x-id'", "messages[0].x-id"),
    ],
)
def test_an_invalid_chat_request_names_the_field(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatCompletionRequest.read({"model": "m", "messages": [HELLO], **fields})
    assert message in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"), [([1, -1], "prompt[1]"), ([], "prompt"), ([[1], []], "prompt[1]"), (3, "prompt")]
)
def test_an_invalid_prompt_gets_the_error_of_the_best_fitting_type(prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        CompletionRequest.read({"model": "m", "prompt": prompt})
    assert caught.value.param == param
