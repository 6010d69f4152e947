"""Property test: a broken request of the Responses API is refused, and never causes another error."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_loop.errors import RequestError
from agent_loop.serve.chat import conversation_of
from agent_loop.serve.responses_requests import CallRecord, ResponsesRequest, translate_response
from tests.harness import examples

BODY: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "late"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Now:"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True},
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.text(max_size=3), st.sampled_from([[], {}, [[]], [{}]])
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(*path, key), *places(value[key], (*path, key))]]


@examples(400, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(places(BODY)), VALUES), max_size=3))
def test_a_broken_request_is_refused_and_nothing_else(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    body = copy.deepcopy(BODY)
    for path, value in changes:
        target: Any = body
        with suppress(KeyError, IndexError, TypeError):
            for key in path[:-1]:
                target = target[key]
            if isinstance(target, dict | list):
                target[path[-1]] = value
    with suppress(ValidationError, RequestError):
        request = ResponsesRequest.model_validate(body)
        prepared = translate_response(request, calls=CallRecord())
        conversation_of(prepared.chat.messages)


def test_the_request_itself_is_accepted() -> None:
    request = ResponsesRequest.model_validate(BODY)
    prepared = translate_response(request, calls=CallRecord())
    roles = [message["role"] for message in conversation_of(prepared.chat.messages)]
    assert roles == ["system", "user", "user", "assistant", "tool", "assistant", "tool"]
