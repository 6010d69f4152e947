"""Tests of requests that are rejected by host name, API key, body size or upload time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient
from uvicorn.server import ServerState

from agent_loop.serve import process
from agent_loop.serve.app import ServedModel, create_app
from agent_loop.serve.gateway import Gateway, create_gateway_app
from agent_loop.serve.middleware import BodyLimiter, answered_hosts
from agent_loop.serve.process import AppServer, BoundedConnection
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing import run_virtual
from tests.helpers import hermes_template
from tests.serving.harness import MODEL

PATHS = ["/v1/models", "/health", "/metrics", "/openapi.json"]


def app_of(**options: Any) -> Any:
    pool = AsyncLLMServerManager([ScriptedServer(lambda _: None)])  # type: ignore[arg-type,return-value]
    return create_app(ServedModel(pool=pool, template=hermes_template(), model=MODEL, **options))


def client(host: str, **options: Any) -> TestClient:
    return TestClient(app_of(**options), base_url=f"http://{host}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
def test_a_request_for_another_host_is_refused(path: str, host: str) -> None:
    asked = client("127.0.0.1", hosts=answered_hosts("127.0.0.1")).get(path, headers={"host": host})
    assert asked.status_code == 421
    assert "--allowed-host" in asked.json()["error"]["message"]


@pytest.mark.parametrize(
    ("listening_at", "allowed", "host"),
    [
        ("127.0.0.1", [], "127.0.0.1:8000"),
        ("127.0.0.1", [], "LOCALHOST:8000"),
        ("127.0.0.1", [], "[::1]:8000"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("gpu-box", [], "gpu-box:8000"),
        ("127.0.0.1", ["model.lan"], "Model.lan"),
        ("0.0.0.0", [], "anything.lan"),
        ("0.0.0.0", ["model.lan"], "model.lan"),
    ],
)
def test_a_server_answers_to_its_own_names(listening_at: str, allowed: list[str], host: str) -> None:
    hosts = answered_hosts(listening_at, more=allowed)
    assert client("x", hosts=hosts).get("/v1/models", headers={"host": host}).status_code == 200


def test_a_server_on_all_addresses_answers_only_to_allowed_names() -> None:
    hosts = answered_hosts("0.0.0.0", more=["model.lan"])
    assert client("x", hosts=hosts).get("/metrics", headers={"host": "other.lan"}).status_code == 421


def test_the_gateway_answers_only_to_local_host_names() -> None:
    gateway = TestClient(create_gateway_app(Gateway()), base_url="http://evil.example")
    openai = gateway.post("/sessions/x/v1/chat/completions", json={})
    anthropic = gateway.post("/sessions/x/v1/messages", json={})
    assert (openai.status_code, anthropic.status_code) == (421, 421)
    assert openai.json()["error"]["type"] == "invalid_request_error"
    assert anthropic.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}]
)
def test_the_key_is_checked_before_the_body_is_read(path: str, headers: dict[str, str]) -> None:
    was_read = False

    app = app_of(api_key="secret")

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        async def receive_counted() -> Any:
            nonlocal was_read
            was_read = True
            return await receive()

        await app(scope, receive_counted, send)

    asked = TestClient(counting).post(path, content=b"no json", headers=headers)
    assert asked.status_code == 401
    assert not was_read


def test_the_key_of_a_session_is_checked_before_the_body_is_read() -> None:
    gateway = TestClient(create_gateway_app(Gateway()), base_url="http://127.0.0.1")
    asked = gateway.post("/sessions/none/v1/chat/completions", content=b"no json")
    assert asked.status_code == 404
    assert "session" in asked.json()["error"]["message"]


def test_a_body_with_a_large_content_length_is_refused_before_it_is_sent() -> None:
    async def read(request: Request) -> Response:
        return Response(await request.body())

    app = BodyLimiter(Starlette(routes=[Route("/", read, methods=["POST"])]), max_bytes=10)
    assert TestClient(app).post("/", content=b"x" * 10).status_code == 200
    assert TestClient(app).post("/", content=b"x" * 11).status_code == 413
    unread: list[int] = []

    async def receive() -> Any:
        unread.append(1)
        return {"type": "http.request", "body": b"", "more_body": True}

    assert asyncio.run(status_of(app, receive, headers=[(b"content-length", b"11")])) == 413
    assert not unread


def test_a_body_that_arrives_too_slowly_is_refused() -> None:
    async def read(request: Request) -> Response:
        return Response(await request.body())

    app = BodyLimiter(Starlette(routes=[Route("/", read, methods=["POST"])]), timeout_s=60)

    async def receive() -> Any:
        await asyncio.sleep(1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    assert run_virtual(status_of(app, receive)) == 408


async def status_of(app: Any, receive: Any, *, headers: Any = ()) -> int:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers), "query_string": b""}
    await app(scope, receive, send)
    return statuses[0]


class RecordingTransport(asyncio.Transport):
    """Transport that records written bytes and whether it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = asyncio.Event()

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def slow_app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(1000)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connection() -> tuple[BoundedConnection, RecordingTransport]:
    config = uvicorn.Config(slow_app, lifespan="off", ws="none", http=BoundedConnection)
    config.load()
    protocol, transport = BoundedConnection(config, ServerState(), {}), RecordingTransport()
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.parametrize("head", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_connection_without_a_complete_request_head_is_closed(head: bytes) -> None:
    async def main() -> float:
        protocol, transport = connection()
        began_at = asyncio.get_running_loop().time()

        if head:
            protocol.data_received(head)
        while head and not transport.closed.is_set():
            protocol.data_received(b"x")
            await asyncio.sleep(1)
        await transport.closed.wait()
        return asyncio.get_running_loop().time() - began_at

    assert run_virtual(main()) == pytest.approx(process.REQUEST_HEAD_TIMEOUT_S, abs=1.5)


def test_a_slow_response_is_not_cut_off() -> None:
    async def main() -> bytes:
        protocol, transport = connection()
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(1001)
        assert not transport.is_closing()
        protocol.data_received(b"GET / HTTP/1.1\r\nHost:")
        await transport.closed.wait()
        return transport.written

    assert run_virtual(main()).startswith(b"HTTP/1.1 200")


def test_applications_are_served_over_bounded_connections() -> None:
    server = AppServer(app_of())
    server.config.load()
    assert server.config.http_protocol_class is BoundedConnection
