"""Tests that no request to a session causes a server error, and that responses match the gateway's OpenAPI schema."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.serve.gateway import Endpoint, reachable
from agent_loop.serve.session import Session
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from tests.gateway.harness import MODEL
from tests.harness import examples
from tests.helpers import hermes_template, text_reply

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SESSION = "/sessions/{session_id}/v1"
VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
OPERATIONS = [
    (f"{SESSION}/chat/completions", "POST", VALID, 40),
    (f"{SESSION}/chat/completions", "POST", INVALID, 40),
    (f"{SESSION}/messages", "POST", VALID, 30),
    (f"{SESSION}/messages", "POST", INVALID, 30),
    (f"{SESSION}/messages/count_tokens", "POST", VALID, 20),
    (f"{SESSION}/responses", "POST", VALID, 30),
    (f"{SESSION}/responses", "POST", INVALID, 30),
    (f"{SESSION}/models", "GET", VALID, 2),
]
PLAIN = {
    f"{SESSION}/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    f"{SESSION}/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    f"{SESSION}/responses": {"input": "hi"},
}
"""Valid requests, because all generated requests of a run may be rejected."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    started: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def main() -> None:
        stopping = asyncio.Event()
        context = LoopContext(
            server_manager=AsyncLLMServerManager([ScriptedServer(lambda _: text_reply("x"), streams=True)]),
            template=hermes_template(),
            limits=EpisodeLimits(prompt_length=4096, response_length=64),
        )
        session = Session(context, max_branches=1_000_000)
        async with session, reachable(session) as reached:
            started.put((reached, asyncio.get_running_loop(), stopping))
            await stopping.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="gateway")
    thread.start()
    reached, loop, stopping = started.get(timeout=TIMEOUT_S)
    yield reached
    loop.call_soon_threadsafe(stopping.set)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def schema(endpoint: Endpoint) -> Any:
    root = endpoint.base_url.partition("/sessions/")[0]
    return schemathesis.openapi.from_url(f"{root}/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode", "num_examples"), OPERATIONS)
def test_no_request_to_a_session_causes_a_server_error_or_an_undeclared_response(
    endpoint: Endpoint, schema: Any, path: str, method: str, mode: GenerationMode, num_examples: int
) -> None:
    operation = schema[path][method]
    session_id = endpoint.base_url.partition("/sessions/")[2].partition("/")[0]
    statuses: set[int] = set()

    def send(case: schemathesis.Case) -> None:
        case.path_parameters = {"session_id": session_id}
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        statuses.add(case.call_and_validate(checks=CHECKS, headers=headers).status_code)

    @examples(
        num_examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_out(case: schemathesis.Case) -> None:
        send(case)

    try_out()
    if mode is VALID and path in PLAIN:
        body = {"model": MODEL, **PLAIN[path]}
        send(operation.Case(body=body, media_type="application/json"))
    assert (400 if mode is INVALID else 200) in statuses or path.endswith("count_tokens")
    assert statuses <= {200, 400, 404, 405}
