"""Tests of the application of `agent-loop serve`: admission, lost clients, failing servers, health and metrics."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from starlette.testclient import TestClient

from agent_loop.errors import BadServerReply, ServerDied
from agent_loop.serve.app import ServedModel, create_app
from agent_loop.serve.middleware import answered_hosts
from agent_loop.servers.balancer import BalancerConfig, LoadBalancer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from tests.helpers import hermes_template, text_reply, user
from tests.serve.applications import MODEL, TIMEOUT_S, ServedApp, SpellingServer, serve_app

# -- admission ---------------------------------------------------------------------------------------------------------


def app_of(**options: Any) -> Any:
    manager = AsyncLLMServerManager([ScriptedServer([])])
    return create_app(ServedModel(manager=manager, template=hermes_template(), model=MODEL, **options))


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics"])
@pytest.mark.parametrize(
    ("listening_at", "allowed", "host", "status"),
    [
        ("127.0.0.1", [], "127.0.0.1:8000", 200),
        ("127.0.0.1", [], "LOCALHOST:8000", 200),
        ("127.0.0.1", [], "[::1]:8000", 200),
        ("127.0.0.1", ["model.lan"], "Model.lan", 200),
        ("127.0.0.1", [], "evil.example", 421),
        ("127.0.0.1", [], "127.0.0.1.evil.example", 421),
        ("127.0.0.1", [], "localhost.evil.example:80", 421),
        ("127.0.0.1", [], "", 421),
        ("10.0.0.5", [], "10.0.0.5", 200),
        ("gpu-box", [], "gpu-box:8000", 200),
        ("0.0.0.0", [], "anything.lan", 200),
        ("0.0.0.0", ["model.lan"], "model.lan", 200),
        ("0.0.0.0", ["model.lan"], "other.lan", 421),
    ],
)
def test_a_server_answers_to_its_own_names_only(
    path: str, listening_at: str, allowed: list[str], host: str, status: int
) -> None:
    app = app_of(hosts=answered_hosts(listening_at, more=allowed))
    asked = TestClient(app, base_url="http://x").get(path, headers={"host": host})
    assert asked.status_code == status
    assert status == 200 or "--allowed-host" in asked.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic secret"])
def test_the_key_is_checked_before_the_body_is_read(path: str, authorization: str | None) -> None:
    was_read = False
    app = app_of(api_key="secret")

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        async def receive_counted() -> Any:
            nonlocal was_read
            was_read = True
            return await receive()

        await app(scope, receive_counted, send)

    headers = {"authorization": authorization} if authorization else {}
    asked = TestClient(counting).post(path, content=b"no json", headers=headers)
    assert asked.status_code == 401
    assert not was_read


@pytest.mark.parametrize(("body", "delay_s", "status"), [(bytes(2**20), 0, 413), (b" ", 1, 408)])
def test_a_body_that_is_too_large_or_too_slow_is_refused_before_all_of_it_has_arrived(
    body: bytes, delay_s: float, status: int
) -> None:
    statuses: list[int] = []

    async def receive() -> Any:
        await asyncio.sleep(delay_s)
        return {"type": "http.request", "body": body, "more_body": True}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", b"application/json")]
    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    run_virtual(app_of()(scope, receive, send))
    assert statuses == [status]


# -- clients that disconnect and servers that fail ---------------------------------------------------------------------

NEVER = text_reply("never", latency_s=math.inf)
ASKED: dict[str, Any] = {"model": MODEL, "messages": user("hi")}


def send(served: ServedApp, path: str, body: dict[str, Any]) -> socket.socket:
    """Return a connection on which a request was sent and nothing was read."""
    where = urlsplit(served.url)
    connection = socket.create_connection((where.hostname, where.port), timeout=30)
    data = json.dumps(body).encode()
    head = f"POST {where.path}{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def get(served: ServedApp, path: str) -> tuple[int, str]:
    url = served.url.removesuffix("/v1") + path
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def client_of(served: ServedApp) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="-", max_retries=0)


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_leases(path: str, n: int, stream: bool) -> None:
    server = SpellingServer(NEVER)
    with serve_app([server]) as served:
        balancer = served.manager.pool.balancer
        asked = ASKED if "chat" in path else {"model": MODEL, "prompt": "hi"}
        connection = send(served, path, {**asked, "n": n, "stream": stream})
        served.until(lambda: server.num_running == n)
        connection.close()
        served.until(lambda: server.num_running == balancer.num_leases == balancer.num_sessions == 0)
        counted = f'agent_loop_requests_total{{route="/v1{path}",status="499"}} 1.0'
        ends_at = time.monotonic() + TIMEOUT_S
        while counted not in get(served, "/metrics")[1]:
            assert time.monotonic() < ends_at


def dies(request: ScriptedRequest) -> ScriptedReply:
    raise ServerDied("the engine is gone", server="scripted-0")


def sends_garbage(request: ScriptedRequest) -> ScriptedReply:
    raise BadServerReply("it answered garbage")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ([ScriptedReply([5], error="out of memory")], 503, "out of memory"),
        (dies, 503, "the engine is gone"),
        (sends_garbage, 502, "garbage"),
        ([NEVER], 504, "took longer"),
    ],
    ids=["fails", "dies", "sends_garbage", "hangs"],
)
def test_failures_have_their_http_status(script: Script, status: int, words: str, stream: bool) -> None:
    server = ScriptedServer(script)
    with serve_app([server], request_timeout_s=0.2) as served, client_of(served) as client:
        with pytest.raises(openai.InternalServerError, match=words) as caught:
            client.chat.completions.create(**ASKED, stream=stream)
        served.until(lambda: server.num_running == 0)
    assert (caught.value.status_code, caught.value.type) == (status, "server_error")


def test_an_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    server = SpellingServer(text_reply("one two three"), hangs=True)
    with serve_app([server], request_timeout_s=0.5) as served, client_of(served) as client:
        stream = client.chat.completions.create(**ASKED, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="took longer"):
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == "one two three"


def test_health_names_the_server_that_is_down() -> None:
    servers = [ScriptedServer([], name="a"), ScriptedServer([], name="b")]
    with serve_app(servers) as served:
        assert get(served, "/health")[0] == 200
        served.run(servers[1].close())
        status, body = get(served, "/health")
    health = json.loads(body)
    assert (status, health["status"]) == (503, "down")
    assert [(each["name"], each["is_alive"]) for each in health["servers"]] == [("a", True), ("b", False)]
    assert "closed" in health["servers"][1]["detail"]


def test_metrics_count_requests_and_tokens() -> None:
    with serve_app([SpellingServer(text_reply("one two"))]) as served:
        with client_of(served) as client:
            usage = client.chat.completions.create(**ASKED).usage
            list(client.chat.completions.create(**ASKED, stream=True))
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="gpt", prompt="hi")
        get(served, "/nowhere/1")
        lines = get(served, "/metrics")[1].splitlines()
    for line in (
        'agent_loop_requests_total{route="/v1/chat/completions",status="200"} 2.0',
        'agent_loop_requests_total{route="/v1/completions",status="404"} 1.0',
        'agent_loop_requests_total{route="other",status="404"} 1.0',
        f"agent_loop_prompt_tokens_total {2.0 * usage.prompt_tokens}",
        f"agent_loop_completion_tokens_total {2.0 * usage.completion_tokens}",
        "agent_loop_time_to_first_token_seconds_count 1.0",
        'agent_loop_request_duration_seconds_count{route="/v1/chat/completions"} 2.0',
        'agent_loop_running{server="scripted-0"} 0.0',
        'agent_loop_waiting{server="scripted-0"} 0.0',
    ):
        assert line in lines


# -- sessions ----------------------------------------------------------------------------------------------------------

MINE = {"x-session-id": "mine"}


def test_a_named_session_stays_on_its_server_and_others_end_with_their_request() -> None:
    servers = [SpellingServer(text_reply("Yes.")) for _ in range(3)]
    for number, server in enumerate(servers):
        server.name = f"scripted-{number}"
    pool = ServerPool(servers, balancer=LoadBalancer(config=BalancerConfig(escape_margin=math.inf)))
    with serve_app(pool) as served, client_of(served) as client:
        for _ in range(6):
            client.chat.completions.create(**ASKED, extra_headers=MINE)
            client.chat.completions.create(**ASKED)
            client.completions.create(model=MODEL, prompt="hi", extra_body={"session_id": "mine"})
        homes = [server for server in servers if any("mine" in r.request_id for r in server.requests)]
        assert len(homes) == 1
        assert sum("mine" in request.request_id for request in homes[0].requests) == 12
        served.until(lambda: served.manager.pool.balancer.num_sessions == 1)


def test_two_concurrent_requests_of_one_session_are_both_completed() -> None:
    server = SpellingServer(NEVER, text_reply("Yes."))
    with serve_app([server]) as served, client_of(served) as client:
        connection = send(served, "/chat/completions", {**ASKED, "session_id": "mine"})
        served.until(lambda: server.num_running == 1)
        assert client.chat.completions.create(**ASKED, extra_headers=MINE).choices
        connection.close()
