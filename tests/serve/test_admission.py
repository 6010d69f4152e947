"""Tests of requests that are rejected by host name, API key, body size or upload time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from agent_loop.serve.app import ServedModel, create_app
from agent_loop.serve.middleware import answered_hosts
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing import run_virtual
from tests.helpers import hermes_template
from tests.serve.applications import MODEL

PATHS = ["/v1/models", "/health", "/metrics"]


def app_of(**options: Any) -> Any:
    manager = AsyncLLMServerManager([ScriptedServer(lambda _: None)])  # type: ignore[arg-type,return-value]
    return create_app(ServedModel(manager=manager, template=hermes_template(), model=MODEL, **options))


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


def test_a_large_body_is_refused_before_all_of_it_has_arrived() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(2**20), "more_body": True}

    assert asyncio.run(status_of(app_of(), receive)) == 413


def test_a_body_that_arrives_too_slowly_is_refused() -> None:
    async def receive() -> Any:
        await asyncio.sleep(1)
        return {"type": "http.request", "body": b" ", "more_body": True}

    assert run_virtual(status_of(app_of(), receive)) == 408


async def status_of(app: Any, receive: Any) -> int:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", b"application/json")]
    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    return statuses[0]
