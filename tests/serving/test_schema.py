"""Tests that no request causes a server error, and that every response matches the served OpenAPI schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.harness import examples
from tests.serving.harness import MODEL, ServedApp, embedded, serve_app

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
OPERATIONS = [
    ("/v1/chat/completions", "POST", VALID, 30),
    ("/v1/chat/completions", "POST", INVALID, 30),
    ("/v1/completions", "POST", VALID, 30),
    ("/v1/completions", "POST", INVALID, 30),
    ("/v1/responses", "POST", VALID, 30),
    ("/v1/responses", "POST", INVALID, 30),
    ("/v1/messages", "POST", VALID, 30),
    ("/v1/messages", "POST", INVALID, 30),
    ("/v1/messages/count_tokens", "POST", VALID, 30),
    ("/v1/messages/count_tokens", "POST", INVALID, 30),
    ("/v1/models", "GET", VALID, 10),
    ("/v1/models/{name}", "GET", VALID, 10),
    ("/health", "GET", VALID, 2),
    ("/metrics", "GET", VALID, 2),
]


PLAIN = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 4},
}
"""Valid requests, because all generated requests of a run may be rejected."""


@pytest.fixture(scope="module")
def served() -> Iterator[ServedApp]:
    with serve_app([embedded(max_model_len=48)], max_model_len=48) as where:
        yield where


@pytest.fixture(scope="module")
def schema(served: ServedApp) -> Any:
    return schemathesis.openapi.from_url(served.url.removesuffix("/v1") + "/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode", "num_examples"), OPERATIONS)
def test_no_request_causes_a_server_error_or_an_undeclared_response(
    schema: Any, path: str, method: str, mode: GenerationMode, num_examples: int
) -> None:
    operation = schema[path][method]
    statuses: set[int] = set()

    @examples(
        num_examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), knows_model=st.booleans())
    def try_out(case: schemathesis.Case, knows_model: bool) -> None:
        if knows_model and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    try_out()
    if mode is VALID and path in PLAIN:
        plain = operation.Case(body={"model": MODEL, **PLAIN[path]}, media_type="application/json")
        statuses.add(plain.call_and_validate(checks=CHECKS).status_code)
    usual = 400 if mode is INVALID else 404 if "name" in path else 200
    assert usual in statuses
