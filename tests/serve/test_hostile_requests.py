"""Tests that invalid requests get an error in the format of their API and never break the gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.serve.gateway import http_client, reachable
from agent_loop.serve.session import Session
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing import run_virtual
from tests.harness import thinned
from tests.helpers import hermes_template, text_reply
from tests.hostile_json import RAW, mutated
from tests.serve.harness import ADD, MODEL


def text(content: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": content}]


SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
SAMPLING: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0.5, "top_k": 3, "stream": False}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    **SAMPLING,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text("1 + 2?"), "name": "ann"},
        {"role": "assistant", "content": "Now:", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ],
    "tools": [ADD],
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [1],
    "n": 1,
}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": text("3"), "is_error": True}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "-"}
DOCUMENT = {"type": "document", "title": "T", "source": PLAIN}
FOUND = {"type": "search_result", "title": "T", "source": "S", "content": text("-")}
MESSAGES = {
    **SAMPLING,
    "system": text("Be brief."),
    "messages": [
        {"role": "user", "content": text("1 + 2?")},
        {"role": "assistant", "content": [THOUGHT, *text("Now:"), USE]},
        {"role": "user", "content": [RESULT, *text("And?"), DOCUMENT, FOUND]},
        {"role": "system", "content": text("Hurry.")},
    ],
    "tools": [{"name": "add", "description": "-", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 10, "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stop_sequences": ["x"],
    "top_p": 0.5,
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "x"}
NAMED = {"type": "function", "name": "f"}
RESPONSES = {
    "model": MODEL,
    "instructions": "Be brief.",
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "late"}]},
        {"role": "user", "content": text("?", "input_text")},
        {"type": "reasoning", "summary": [], "content": text("Hm.", "reasoning_text")},
        {"type": "message", "role": "assistant", "content": text("Now:", "output_text")},
        {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": text("3", "input_text")},
        {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
    ],
    "tools": [
        {**NAMED, "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "p", "format": GRAMMAR},
        {"type": "namespace", "name": "n", "description": "d", "tools": [NAMED]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
COUNTED = {key: MESSAGES[key] for key in ("model", "messages", "system", "tools", "tool_choice", "thinking")}


@asynccontextmanager
async def session() -> AsyncGenerator[tuple[Any, str, dict[str, str]]]:
    server = ScriptedServer(lambda _: text_reply("Yes."), streams=True)
    context = LoopContext(
        server_manager=AsyncLLMServerManager([server]),
        template=hermes_template(),
        limits=EpisodeLimits(prompt_length=100_000, response_length=4096),
    )
    async with Session(context, max_branches=1_000_000) as opened, reachable(opened) as endpoint:
        async with http_client(endpoint.app) as client:
            headers = {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"}
            yield client, endpoint.base_url, headers
        assert opened.fault is None


async def answers(path: str, bodies: Iterable[bytes]) -> list[tuple[int, bytes, bytes]]:
    async with session() as (client, url, headers):
        found: list[tuple[int, bytes, bytes]] = []
        for body in bodies:
            reply = await client.post(f"{url}{path}", content=body, headers=headers)
            found.append((reply.status_code, body, reply.content))
        return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/messages", MESSAGES),
        ("/messages/count_tokens", COUNTED),
        ("/responses", RESPONSES),
    ],
)
def test_a_request_with_one_invalid_part_gets_a_completion_or_a_400(path: str, body: Any) -> None:
    bodies = [*(json.dumps(changed).encode() for changed in thinned([*mutated(body)], step=7)), *RAW]
    found = run_virtual(answers(path, bodies))
    faults = [(status, sent[:300], reply[:300]) for status, sent, reply in found if status not in (200, 400)]
    assert faults == []
    assert {status for status, _, _ in found} == {200, 400}
    for status, _, reply in found:
        if status == 400:
            error = json.loads(reply)
            assert error["error"]["message"]
            assert error["error"]["type"] == "invalid_request_error"
            assert not path.startswith("/messages") or error["type"] == "error"
