"""Requests that no client should send are refused in OpenAI's shape, and never break the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from agent_loop.serve.app import ServedModel, create_app
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from tests.harness import thinned
from tests.helpers import hermes_template, text_reply
from tests.hostile_json import RAW, mutated
from tests.serve.applications import MODEL

TEXT = {
    "model": MODEL,
    "prompt": ["hi", "ho"],
    "max_tokens": 4,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "stop": "x",
    "seed": 3,
    "stop_token_ids": [1],
    "session_id": "s",
    "stream": False,
    "stream_options": {"include_usage": True},
}
IDS = {"model": MODEL, "prompt": [[1, 2], [3]], "max_tokens": 4}


@pytest.fixture
def client() -> Iterator[TestClient]:
    pool = AsyncLLMServerManager([ScriptedServer(lambda _: text_reply("Yes."))])
    app = create_app(ServedModel(pool=pool, template=hermes_template(), model=MODEL, max_model_len=4096))
    with TestClient(app, raise_server_exceptions=False) as opened:  # one event loop for all requests
        yield opened


def refused(status: int, reply: bytes) -> bool:
    error = json.loads(reply)["error"]
    kinds = ("invalid_request_error", "not_found_error")
    return status in (400, 404) and bool(error["message"]) and error["type"] in kinds


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", TEXT),
        ("completions", IDS),
    ],
)
def test_a_request_with_one_invalid_part_gets_a_completion_or_a_400(
    client: TestClient, path: str, body: Any
) -> None:
    bodies = [*(json.dumps(changed).encode() for changed in thinned([*mutated(body)], step=3)), *RAW]
    json_type = {"content-type": "application/json"}
    replies = [(sent, client.post(f"/v1/{path}", content=sent, headers=json_type)) for sent in bodies]
    faults = [
        (reply.status_code, sent[:300], reply.content[:300])
        for sent, reply in replies
        if reply.status_code != 200 and not refused(reply.status_code, reply.content)
    ]
    assert faults == []
    assert {reply.status_code for _, reply in replies} >= {200, 400}


@pytest.mark.parametrize("name", ["9" * 5000, "%00", "%ff", "..%2f", "a/b/c", "\u2028"])
def test_a_model_of_any_name_is_looked_up(client: TestClient, name: str) -> None:
    reply = client.get(f"/v1/models/{name}")
    assert refused(reply.status_code, reply.content)
