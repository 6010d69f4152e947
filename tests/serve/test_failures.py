"""Clients that disconnect, servers that fail, and how both are reported."""

from __future__ import annotations

import json
import math
import socket
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import openai
import pytest

from agent_loop.errors import BadServerReply, ServerDied
from agent_loop.servers.balancer import BalancerConfig, LoadBalancer
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest, ScriptedServer
from tests.helpers import text_reply, user
from tests.serve.applications import MODEL, TIMEOUT_S, ServedApp, SpellingServer, serve_app

NEVER = text_reply("never", latency_s=math.inf)


def send(served: ServedApp, path: str, body: dict) -> socket.socket:
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
        asked = {"messages": user("hi")} if "chat" in path else {"prompt": "hi"}
        connection = send(served, path, {"model": MODEL, **asked, "n": n, "stream": stream})
        served.until(lambda: server.num_running == n)
        connection.close()
        served.until(lambda: server.num_running == 0)
        served.until(
            lambda: served.manager.pool.balancer.num_leases == served.manager.pool.balancer.num_sessions == 0
        )
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
    ],
    ids=["fails", "dies", "sends_garbage"],
)
def test_failures_have_their_http_status(script: Script, status: int, words: str, stream: bool) -> None:
    with (
        serve_app([ScriptedServer(script)]) as served,
        client_of(served) as client,
        pytest.raises(openai.InternalServerError, match=words) as caught,
    ):
        client.chat.completions.create(model=MODEL, messages=user("hi"), stream=stream)
    assert caught.value.status_code == status
    assert caught.value.type == "server_error"


def test_a_completion_that_takes_too_long_is_a_gateway_timeout() -> None:
    server = SpellingServer(NEVER)
    with serve_app([server], request_timeout_s=0.2) as served, client_of(served) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=MODEL, messages=user("hi"), stream=stream)
            assert caught.value.status_code == 504
        served.until(lambda: server.num_running == 0)


def test_an_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    server = SpellingServer(text_reply("one two three"), hangs=True)
    with serve_app([server], request_timeout_s=0.5) as served, client_of(served) as client:
        stream = client.chat.completions.create(model=MODEL, messages=user("hi"), stream=True)
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
    assert status == 503
    health = json.loads(body)
    assert health["status"] == "down"
    assert [(server["name"], server["is_alive"]) for server in health["servers"]] == [
        ("a", True),
        ("b", False),
    ]
    assert "closed" in health["servers"][1]["detail"]


def test_metrics_count_requests_and_tokens() -> None:
    with serve_app([SpellingServer(text_reply("one two"))]) as served:
        with client_of(served) as client:
            usage = client.chat.completions.create(model=MODEL, messages=user("hi")).usage
            list(client.chat.completions.create(model=MODEL, messages=user("hi"), stream=True))
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


def test_a_named_session_stays_on_its_server_and_others_end_with_their_request() -> None:
    servers = [SpellingServer(text_reply("Yes.")) for _ in range(3)]
    for number, server in enumerate(servers):
        server.name = f"scripted-{number}"
    pool = ServerPool(servers, balancer=LoadBalancer(config=BalancerConfig(escape_margin=math.inf)))
    with serve_app(pool) as served, client_of(served) as client:
        for _ in range(6):
            client.chat.completions.create(
                model=MODEL, messages=user("hi"), extra_headers={"x-session-id": "mine"}
            )
            client.chat.completions.create(model=MODEL, messages=user("hi"))
            client.completions.create(model=MODEL, prompt="hi", extra_body={"session_id": "mine"})
        homes = [server for server in servers if any("mine" in r.request_id for r in server.requests)]
        assert len(homes) == 1
        assert sum("mine" in request.request_id for request in homes[0].requests) == 12
        served.until(lambda: served.manager.pool.balancer.num_sessions == 1)


def test_two_concurrent_requests_of_one_session_are_both_completed() -> None:
    server = SpellingServer(NEVER, text_reply("Yes."))
    with serve_app([server]) as served, client_of(served) as client:
        asked = {"model": MODEL, "messages": user("hi"), "session_id": "mine"}
        connection = send(served, "/chat/completions", asked)
        served.until(lambda: server.num_running == 1)
        assert client.chat.completions.create(
            model=MODEL, messages=user("hi"), extra_headers={"x-session-id": "mine"}
        ).choices
        connection.close()
